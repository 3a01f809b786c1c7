"""`make soak`: requests of mixed sizes at saturation, with the hang detector on. Nothing may be taken for a hang.

REQUESTS=20000 by default, or SECONDS. Says at the end whether memory and open files of both processes were level over
the last half, where level is: the straight line through the samples rises by less than `MAX_GROWTH` of their mean.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.http_streams import Exchange, ask
from tests.robustness.server_process import ServerProcess, num_open_files, resident_bytes

MAX_GROWTH = 0.03
# Pages are few enough to be all touched early, so that memory can be level; requests are preempted too.
FLAGS = ("--max-num-seqs", "64", "--num-gpu-blocks-override", "500", "--disable-access-log")
NUM_CLIENTS = 96
RESTARTS, TOKENS = "quire:engine_restarts", "vllm:generation_tokens_total"
SAMPLE_S = 1.0


@dataclass
class Course:
    """What was seen.

    Attributes:
        wrong: answers that were not whole.
        num_restarts: of the engine core.
        samples: name -> values, one a look.
    """

    num_requests: int = 0
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    num_restarts: int = 0
    seconds: float = 0.0
    samples: dict[str, list[float]] = field(default_factory=dict)

    def growth(self, name: str) -> float:
        """Rise of the line through the last half of the samples, as a share of their mean."""
        values = self.samples[name][len(self.samples[name]) // 2 :]
        mean = sum(values) / len(values)
        return slope(values) * len(values) / mean

    @property
    def is_level(self) -> bool:
        """True when nothing grew over the last half."""
        return all(self.growth(name) < MAX_GROWTH for name in self.samples)


def slope(values: Sequence[float]) -> float:
    """Rise from one value to the next of the straight line that fits best."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread if spread else 0.0


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body): mostly short, some with a long prompt, many answers, logprobs or stop texts."""
    words = rng.choices(("one", "river", "Anna", "27 + 58", "the", "blue", "says", "?"), k=rng.choice((3, 8, 20, 250)))
    body: dict[str, Any] = {"model": "leaf", "max_tokens": rng.choice((1, 4, 16, 16, 40, 120)), "ignore_eos": True}
    body |= {"stream": rng.random() < 0.6, "temperature": rng.choice((0, 0.7, 1.0)), "seed": rng.randrange(1000)}
    if body["temperature"] and rng.random() < 0.15:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.1:
        body["stop"] = ["e", "\n\n"]
    if rng.random() < 0.5:
        if rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": " ".join(words)}]}
    return "/v1/completions", {**body, "prompt": " ".join(words)}


async def soak(
    server: ServerProcess, may_go_on: Callable[[Course], bool], num_clients: int = NUM_CLIENTS, seed: int = 0
) -> Course:
    """Ask with `num_clients` at once for as long as `may_go_on`."""
    course, rng, start = Course(), random.Random(seed), time.monotonic()
    core_pid = server.core_pid
    page = (await ask(server.port, "/metrics")).body.decode()
    watching = asyncio.ensure_future(_watch(server, core_pid, course))

    async def client() -> None:
        while may_go_on(course):
            course.num_requests += 1
            path, body = random_request(rng)
            exchange = await ask(server.port, path, body)
            if not is_well(exchange, is_stream=body["stream"]):
                course.wrong.append(f"{path} {body} -> {exchange.status}, {exchange.body[-200:]!r}"[-600:])
        watching.cancel()  # fewer clients, fewer files: what comes now says nothing

    await asyncio.gather(*(client() for _ in range(num_clients)))
    course.seconds = time.monotonic() - start
    later = (await ask(server.port, "/metrics")).body.decode()
    counts = [int(metric(later, name) - metric(page, name)) for name in (RESTARTS, TOKENS)]
    course.num_restarts, course.num_tokens = counts
    assert course.num_restarts or server.core_pid == core_pid
    return course


def is_well(exchange: Exchange, *, is_stream: bool) -> bool:
    """A whole answer without an error in it."""
    if is_stream:
        return exchange.is_whole and b'data: {"error"' not in exchange.body
    return exchange.status == 200 and exchange.is_complete


def metric(page: str, name: str) -> float:
    """Sum of a metric's series."""
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def _watch(server: ServerProcess, core_pid: int, course: Course) -> None:
    looks: dict[str, Callable[[], float]] = {
        "front-end memory": lambda: resident_bytes(server.pid) / 2**20,
        "core memory": lambda: resident_bytes(core_pid) / 2**20,
        "front-end files": lambda: num_open_files(server.pid),
        "core files": lambda: num_open_files(core_pid),
    }
    while True:
        for name, look in looks.items():
            course.samples.setdefault(name, []).append(look())
        await asyncio.sleep(SAMPLE_S)


async def _report(course: Course, num_requests: int) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(30)
        now = ", ".join(f"{name} {values[-1]:.1f}" for name, values in course.samples.items())
        print(f"{course.num_requests} of {num_requests} requests, {time.monotonic() - start:.0f} s; {now}; "
              f"{len(course.wrong)} wrong, load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip


def main() -> int:
    """Exit code 0 when nothing went wrong and everything was level."""
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, help="in place of a number of requests")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + (arguments.seconds or float("inf"))
    reporting: list[asyncio.Task[None]] = []

    def may_go_on(course: Course) -> bool:
        if not reporting:
            reporting.append(asyncio.ensure_future(_report(course, arguments.requests)))
        is_enough = arguments.seconds is None and course.num_requests >= arguments.requests
        return not is_enough and time.monotonic() < deadline and len(course.wrong) < 20

    with ServerProcess(*FLAGS) as server:
        course = asyncio.run(soak(server, may_go_on, seed=arguments.seed))
        alarms = [line for line in server.log.splitlines() if "hang: " in line or "engine core failed" in line]
        errors = [line for line in server.log.splitlines() if line.startswith(("ERROR", "Traceback"))]
    for line in [*course.wrong, *alarms, *errors]:
        print(line)
    for name, values in course.samples.items():
        half = values[len(values) // 2 :]
        print(f"{name}: {half[0]:.1f} to {half[-1]:.1f} over the last half, line {100 * course.growth(name):+.2f}%")
    is_well_done = not course.wrong and not course.num_restarts and not alarms and not errors and course.is_level
    print(f"soak: {course.num_requests} requests, {course.num_tokens} tokens, {course.seconds:.0f} s, "
          f"{len(course.wrong)} wrong, {course.num_restarts} restarts, {len(alarms)} alarms, "
          f"{'level' if course.is_level else 'NOT LEVEL'}")  # fmt: skip
    return 0 if is_well_done else 1


if __name__ == "__main__":
    sys.exit(main())
