"""`make soak-kill`: 32 HTTP streams whose engine core is killed or stopped under them, ROUNDS=20 times and more.

Every stream must say what it says undisturbed; the longest silence of each is noted. After every round nothing may be
left over: no other child, no socket directory, no open file more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.http_streams import Exchange, answer_of, ask
from tests.robustness.server_process import ServerProcess, children_of, num_open_files, wait_until
from tests.robustness.soak import metric

FLAGS = ("--disable-access-log",)
MAX_MEDIAN_SILENCE_S = 3.0
NOTICED_S, RECOVERED_S = 10.0, 30.0
POLL_S = 0.05
Request = tuple[str, dict[str, Any]]
Fault = Callable[[ServerProcess, random.Random], Awaitable[None]]


def make_requests(count: int, max_tokens: int) -> list[Request]:
    """Streams of both kinds: greedy and seeded, some with two answers, logprobs, penalties, or a long prompt."""
    requests = []
    for i in range(count):
        body: dict[str, Any] = {
            "model": "leaf", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": i % 5 != 0,
            "max_tokens": max_tokens + 7 * (i % 4), "temperature": 0.0,
        }  # fmt: skip
        if i % 2:
            body |= {"temperature": 1.0, "seed": i, "n": 1 + i % 4 // 3}
        if i % 6 == 1:
            body |= {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2, "presence_penalty": 0.4}
        text = f"Number {i}: Anna has {i + 3} apples. " * (25 if i % 8 == 6 else 1)
        if i % 3:
            body |= {"logprobs": True, "top_logprobs": 2} if i % 9 == 4 else {}
            requests.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            body |= {"logprobs": 3, "echo": True} if i % 9 == 3 else {}
            requests.append(("/v1/completions", {**body, "prompt": text}))
    return requests


def long_requests(count: int) -> list[Request]:
    """Streams whose prompts take a while."""
    text = "The quick brown fox jumps over the lazy dog. "
    return [
        ("/v1/completions", {"model": "leaf", "stream": True, "max_tokens": 8, "temperature": 0,
                             "prompt": f"{i}. " + text * 120})
        for i in range(count)
    ]  # fmt: skip


# --- what is done to a server ---


async def kill(server: ServerProcess, rng: random.Random) -> None:
    """The core is killed."""
    os.kill(server.core_pid, signal.SIGKILL)


async def kill_twice(server: ServerProcess, rng: random.Random) -> None:
    """The core is killed, and the next one soon after it serves."""
    before = await num_restarts(server)
    await kill(server, rng)
    while await num_restarts(server) == before:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2 * rng.random())
    await kill(server, rng)


async def kill_during_restart(server: ServerProcess, rng: random.Random) -> None:
    """The core is killed, and the next one while it starts."""
    first = server.core_pid
    os.kill(first, signal.SIGKILL)
    while (children := children_of(server.pid)) in ([], [first]):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.5 * rng.random())
    os.kill(children[-1], signal.SIGKILL)


async def stop(server: ServerProcess, rng: random.Random) -> None:
    """The core is stopped, and stays so."""
    os.kill(server.core_pid, signal.SIGSTOP)


async def stop_and_continue(server: ServerProcess, rng: random.Random) -> None:
    """The core is stopped for less than the timeout."""
    pid = server.core_pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1 + rng.random())
    os.kill(pid, signal.SIGCONT)


# --- a round ---


@dataclass
class Round:
    """What came of one.

    Attributes:
        name: of the fault.
        different: indexes of streams that were not as undisturbed.
        silences: the longest wait of each stream that ran at the fault or after it, in seconds.
        restarts: of the core, in this round.
        noticed_s, recovered_s: when `/ready` said no, and yes again, after the fault.
        tidied_s: after the streams' end.
    """

    name: str
    different: list[int] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    restarts: int = 0
    noticed_s: float | None = None
    recovered_s: float | None = None
    tidied_s: float = 0.0

    def __str__(self) -> str:
        silence = "-"
        if self.silences:
            silence = f"{statistics.median(self.silences):.2f}/{max(self.silences):.2f}"
        health = "-" if self.noticed_s is None else f"{self.noticed_s:.2f} to {self.recovered_s or float('nan'):.2f}"
        return (f"{self.name}: {len(self.different)} differ, {self.restarts} restarts, "
                f"silence median/max {silence} s, not ready {health} s after")  # fmt: skip


@dataclass(frozen=True)
class Undisturbed:
    """What streams say when nothing happens.

    Attributes:
        answers: of each stream.
        num_pieces: in which all of them came.
        seconds: until the last one's end.
    """

    requests: list[Request]
    answers: list[Any]
    num_pieces: int
    seconds: float


async def undisturbed(server: ServerProcess, requests: list[Request]) -> Undisturbed:
    """Stream all requests at once."""
    start = time.monotonic()
    exchanges = await asyncio.gather(*(ask(server.port, path, body) for path, body in requests))
    num_pieces = sum(len(one.pieces) for one in exchanges)
    return Undisturbed(requests, [answer_of(one) for one in exchanges], num_pieces, time.monotonic() - start)


async def disturbed(
    server: ServerProcess, usual: Undisturbed, fault: Fault, share: float, rng: random.Random, delay_s: float = 0.0
) -> Round:
    """Stream all requests; do `fault` when `share` of the answers has come; compare, and see that nothing is left over.

    Raises:
        AssertionError: a stream did not end well, or something was left over.
    """
    files, restarts = num_open_files(server.pid), await num_restarts(server)
    found = Round(str(fault.__doc__).rstrip("."))
    exchanges = [Exchange() for _ in usual.requests]
    streams = [
        asyncio.ensure_future(ask(server.port, path, body, exchange))
        for (path, body), exchange in zip(usual.requests, exchanges, strict=True)
    ]
    while sum(len(one.pieces) for one in exchanges) < share * usual.num_pieces:
        await asyncio.sleep(0.002)
        if 3 * sum(one.is_complete for one in exchanges) >= len(exchanges):  # deltas that were merged are few pieces
            break
    await asyncio.sleep(delay_s)
    moment = time.monotonic()
    watching = asyncio.ensure_future(_watch_health(server, moment, found))
    await fault(server, rng)
    await asyncio.gather(*streams)
    if fault is not stop_and_continue:
        while await num_restarts(server) == restarts:  # streams may have ended before the core did
            await asyncio.sleep(POLL_S)
    while (await ask(server.port, "/ready")).status != 200:
        await asyncio.sleep(POLL_S)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    if found.noticed_s is not None and found.recovered_s is None:
        found.recovered_s = time.monotonic() - moment
    found.restarts = await num_restarts(server) - restarts
    found.different = [i for i, one in enumerate(exchanges) if answer_of(one) != usual.answers[i]]
    found.silences = [silence for one in exchanges if (silence := one.silence_after(moment)) is not None]
    found.tidied_s = wait_until_tidy(server, files)
    return found


def wait_until_tidy(server: ServerProcess, num_files: int) -> float:
    """Wait until there is one child, no temporary file, and as many open files as before."""
    return wait_until(
        lambda: len(children_of(server.pid)) == 1 and not server.leftovers and num_open_files(server.pid) <= num_files,
        f"nothing is left over (children {children_of(server.pid)}, files {server.leftovers}, "
        f"{num_open_files(server.pid)} open, {num_files} before)",
        timeout_s=60,
    )


async def num_restarts(server: ServerProcess) -> int:
    """How often the core was replaced."""
    return int(metric((await ask(server.port, "/metrics")).body.decode(), "quire:engine_restarts"))


async def _watch_health(server: ServerProcess, moment: float, found: Round) -> None:
    while True:
        live, ready = await asyncio.gather(ask(server.port, "/live"), ask(server.port, "/ready"))
        assert live.status == 200, "the front-end is alive whatever its core does"
        now = time.monotonic() - moment
        if ready.status != 200:
            assert ready.status == 503, ready.status
            assert int(ready.headers["retry-after"]) > 0
            found.noticed_s = found.noticed_s or now
            found.recovered_s = None
        elif found.noticed_s is not None:
            found.recovered_s = found.recovered_s or now
        await asyncio.sleep(POLL_S)


# --- all of them ---


@dataclass
class Tally:
    """Rounds, and what was wrong with them."""

    rounds: list[Round] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, one: Round, is_right: bool = True) -> None:
        """Note a round and print it."""
        self.rounds.append(one)
        print(f"{one}, load {os.getloadavg()[0]:.1f}", flush=True)
        if one.different or not is_right:
            self.wrong.append(str(one))


async def run_rounds(server: ServerProcess, count: int, num_streams: int, rng: random.Random) -> Tally:
    """Kill `count` times at random moments, then everything else once or twice."""
    tally = Tally()
    usual = await undisturbed(server, make_requests(num_streams, 120))
    assert await answers_again(server, usual), "streams are the same when nothing happens"
    prompts = await undisturbed(server, long_requests(8))
    print(f"{num_streams} streams take {usual.seconds:.1f} s undisturbed", flush=True)

    async def one(fault: Fault, is_right: Callable[[Round], bool]) -> None:
        found = await disturbed(server, usual, fault, 0.9 * rng.random(), rng)
        tally.add(found, is_right(found))

    for _ in range(count):
        await one(kill, lambda found: found.restarts == 1)
    for _ in range(2):
        await one(kill_twice, lambda found: found.restarts == 2)
        await one(kill_during_restart, lambda found: found.restarts == 1)
        await one(stop_and_continue, lambda found: found.restarts == 0)
        await one(stop, is_noticed_and_recovered)
        found = await disturbed(server, prompts, kill, 0.0, rng, delay_s=0.3 * prompts.seconds * rng.random())
        found.name += " while it computes long prompts"
        tally.add(found)
        found = await disturbed(server, Undisturbed([], [], 0, 0.0), kill, 0.0, rng)
        found.name += " while it is idle"
        tally.add(found)
        if not await answers_again(server, usual):
            tally.wrong.append("after that, streams differ")
    return tally


async def answers_again(server: ServerProcess, usual: Undisturbed) -> bool:
    """Whether the streams say the same once more."""
    return (await undisturbed(server, usual.requests)).answers == usual.answers


def is_noticed_and_recovered(found: Round) -> bool:
    """In time."""
    return (found.noticed_s or 1e9) <= NOTICED_S and (found.recovered_s or 1e9) <= RECOVERED_S and found.restarts == 1


def main() -> int:
    """Exit code 0 when every stream of every round was as undisturbed, and the silences were short."""
    parser = argparse.ArgumentParser(prog="make soak-kill")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--speculative-config", default="off", help="of the server")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with ServerProcess(*FLAGS, "--speculative-config", arguments.speculative_config) as server:
        tally = asyncio.run(run_rounds(server, arguments.rounds, arguments.streams, random.Random(arguments.seed)))
        lines = [line for line in server.log.splitlines() if line.startswith("Traceback")]
    silences = [one for found in tally.rounds[: arguments.rounds] for one in found.silences]
    median = statistics.median(silences)
    num_different = sum(len(found.different) for found in tally.rounds)
    for line in [*tally.wrong, *lines]:
        print(f"wrong: {line}")
    print(f"soak-kill: {len(tally.rounds)} rounds, {num_different} streams differ, silence of {len(silences)} killed "
          f"streams: median {median:.2f} s, max {max(silences):.2f} s")  # fmt: skip
    return 1 if tally.wrong or lines or not median <= MAX_MEDIAN_SILENCE_S else 0


if __name__ == "__main__":
    sys.exit(main())
