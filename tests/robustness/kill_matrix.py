"""`make test-kill-matrix`: a server with two replicas, parts of which are killed at chosen moments; ROUNDS=200.

Every stream must be whole and say what it says undisturbed; of a front end that is killed, those that were its own may
break, and no other. `VICTIMS` and `MOMENTS` are tables: a new kind of process
or of moment is one entry.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.http_streams import Exchange, answer_of, ask
from tests.robustness.server_process import (
    ServerProcess,
    children_of,
    cores_of,
    front_ends_of,
    server_of_connections,
    wait_until,
)
from tests.robustness.soak import metric
from tests.robustness.survive import Request, Undisturbed, undisturbed

# Replicas without requests between their deaths are not to be given up: that is another test's.
BASE = ("--disable-access-log", "--data-parallel-size", "2", "--max-restarts", "1000")
SCARCE = (
    "--swap-space", "0.05", "--preemption-mode", "swap", "--num-gpu-blocks-override", "24", "--max-model-len", "320",
)  # fmt: skip
DRAFTS = ("--speculative-config", '{"method": "suffix"}')
MODEL_DRAFTS = ("--speculative-config", '{"method": "eagle", "enable_adaptive_verification": false}')
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ages": {"type": "array", "items": {"type": "integer"},
                                                                       "minItems": 4, "maxItems": 8}},
    "required": ["name", "ages"],
}  # fmt: skip
Victim = Callable[[ServerProcess, random.Random], Awaitable[int | None]]
"""Kills something; the front end that it killed, whose connections break, or None."""


# --- who is killed ---


async def core(server: ServerProcess, rng: random.Random) -> None:
    """The engine core of a replica."""
    os.kill(rng.choice(cores_of(server.pid)), signal.SIGKILL)


async def front_end(server: ServerProcess, rng: random.Random) -> int:
    """One of the front ends."""
    victim = rng.choice(front_ends_of(server.pid))
    os.kill(victim, signal.SIGKILL)
    return victim


async def replica(server: ServerProcess, rng: random.Random) -> None:
    """A replica that cannot come back at once: its core, and the next one while it starts."""
    before = children_of(server.pid)
    os.kill(rng.choice(before), signal.SIGKILL)
    while not (born := [pid for pid in children_of(server.pid) if pid not in before]):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.3 * rng.random())
    os.kill(born[0], signal.SIGKILL)


async def other_rank(server: ServerProcess, rng: random.Random) -> None:
    """The process of a rank beside the core's own, which computes a part of a replica's model, or its second stage."""
    os.kill(rng.choice([pid for core_pid in children_of(server.pid) for pid in children_of(core_pid)]), signal.SIGKILL)


TWO_FRONT_ENDS = ("--api-server-count", "2")
VICTIMS: dict[str, Victim] = {
    "core": core, "replica": replica, "other rank": other_rank, "stage": other_rank, "core of stages": core,
    "front end": front_end, "core behind front ends": core,
}  # fmt: skip
TWO_STAGES = ("--pipeline-parallel-size", "2")
VICTIM_FLAGS: dict[str, tuple[str, ...]] = {
    "other rank": ("--tensor-parallel-size", "2"), "stage": TWO_STAGES, "core of stages": TWO_STAGES,
    "front end": TWO_FRONT_ENDS,
    "core behind front ends": TWO_FRONT_ENDS,
}  # fmt: skip
"""What the server of a victim is started with; streams are compared within one server."""


# --- when ---


@dataclass(frozen=True)
class Moment:
    """A state of requests in which something is killed.

    Attributes:
        flags: of the server, beside `BASE`.
        requests: made for a seed.
        share: of the answers that has come; 0 = they are sent, and prompts are being computed.
        metric: that has grown, or is above 0, in place of a share.
    """

    flags: tuple[str, ...]
    requests: Callable[[int], list[Request]]
    share: float = 0.0
    metric: str = ""

    async def is_reached(self, server: ServerProcess, exchanges: list[Exchange], usual: int, before: float) -> bool:
        """Whether it is now; `usual` pieces come undisturbed, `before` was the metric's value."""
        num_pieces = sum(len(one.pieces) for one in exchanges)
        if self.metric:
            return num_pieces > 0 and await value_of(server, self.metric) > before
        return num_pieces >= self.share * usual


async def value_of(server: ServerProcess, name: str) -> float:
    """Of a metric; a counter's name ends in _total."""
    return metric((await ask(server.port, "/metrics")).body.decode(), name)


def body(seed: int, prompt: str, max_tokens: int, **more: Any) -> Request:
    """A stream, greedy or drawn by turns."""
    return "/v1/completions", {
        "model": "leaf", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": seed % 2,
        "seed": seed, **more,
    }  # fmt: skip


def long_prompts(seed: int) -> list[Request]:
    return [body(seed + i, f"{seed + i}. " + "The quick brown fox jumps. " * 150, 12) for i in range(6)]


def plain(seed: int) -> list[Request]:
    return [body(seed + i, f"Number {seed + i}: Once", 60, ignore_eos=True, logprobs=i % 2) for i in range(8)]


def structured(seed: int) -> list[Request]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return [body(seed + i, f"Person {seed + i}: ", 120, response_format=form) for i in range(6)]


def crowded(seed: int) -> list[Request]:
    return [body(seed + i, f"Number {seed + i}: Once " * 4, 120, ignore_eos=True) for i in range(10)]


def repetitive(seed: int) -> list[Request]:
    return [body(seed + i, f"{i} one two three four one two three four " * 6, 200, ignore_eos=True) for i in range(6)]


MOMENTS = {
    "prefill": Moment((), long_prompts),
    "decode": Moment((), plain, share=0.33),
    "structured": Moment((), structured, share=0.33),
    "swapped": Moment(SCARCE, crowded, metric="quire:num_requests_swapped"),
    "mid-speculation": Moment(DRAFTS, repetitive, metric="vllm:spec_decode_num_draft_tokens_total"),
    "a model drafts": Moment(MODEL_DRAFTS, repetitive, metric="vllm:spec_decode_num_draft_tokens_total"),
}


# --- rounds ---


@dataclass
class Tally:
    """Counts by (victim, moment).

    Attributes:
        reached: rounds whose moment came before the streams ended.
        streams, differ: of all rounds.
        broken: streams of front ends that were killed, which are not compared.
        moved: answers that went on at another core.
    """

    rounds: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: Counter[tuple[str, str]] = field(default_factory=Counter)
    streams: int = 0
    differ: int = 0
    broken: int = 0
    moved: int = 0
    wrong: list[str] = field(default_factory=list)


async def play(server: ServerProcess, victim: str, moment: str, usual: Undisturbed, tally: Tally, seed: int) -> None:
    """One round."""
    state, rng = MOMENTS[moment], random.Random(seed)
    resumed = await value_of(server, "quire:resumed_streams")
    before = await value_of(server, state.metric) if state.metric.endswith("_total") else 0.0
    exchanges = [Exchange() for _ in usual.requests]
    streams = [
        asyncio.ensure_future(ask(server.port, path, body, exchange))
        for (path, body), exchange in zip(usual.requests, exchanges, strict=True)
    ]
    await asyncio.sleep(0.15 * rng.random())
    while not all(one.done() for one in streams):
        if await state.is_reached(server, exchanges, usual.num_pieces, before):
            tally.reached[victim, moment] += not all(one.done() for one in streams)
            break
        await asyncio.sleep(0.002)
    servers = server_of_connections(server.port, front_ends_of(server.pid))
    killed = await VICTIMS[victim](server, rng)
    await asyncio.gather(*streams)
    tally.rounds[victim, moment] += 1
    tally.streams += len(streams)
    for number, one in enumerate(exchanges):
        if not one.is_whole and killed is not None and servers.get(one.local_port) == killed:
            tally.broken += 1
        elif not one.is_whole or answer_of(one) != usual.answers[number]:
            tally.differ += 1
            tally.wrong.append(f"{victim} in {moment}, seed {seed}: stream {number} of status {one.status}")
    await asyncio.to_thread(wait_until, lambda: len(cores_of(server.pid)) == 2, "there are two cores again")
    if killed is not None:
        await asyncio.to_thread(wait_until, lambda: len(front_ends_of(server.pid)) == 2, "there are two front ends")
        while await value_of(server, "vllm:num_requests_running"):
            await asyncio.sleep(0.02)
    while (await ask(server.port, "/ready")).status != 200 or await value_of(server, "quire:replicas_ready") < 2:
        await asyncio.sleep(0.02)
    tally.moved += int(await value_of(server, "quire:resumed_streams") - resumed)


def tracebacks(log: str) -> list[str]:
    """Those in a log, each with the line before it."""
    lines = log.splitlines()
    return ["\n".join(lines[max(0, n - 1) : n + 40]) for n, line in enumerate(lines) if line.startswith("Traceback")]


def run(moments: list[str], victims: list[str], rounds: int, seed: int, tally: Tally) -> None:
    """As many rounds as fall to these moments, one server for those with the same flags."""
    by_flags: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for victim, moment in itertools.product(victims, moments):
        flags = (*VICTIM_FLAGS.get(victim, ()), *MOMENTS[moment].flags)
        by_flags.setdefault(flags, []).append((victim, moment))
    for flags, cells in by_flags.items():
        with ServerProcess(*BASE, *flags) as server:
            for moment, of_moment in itertools.groupby(sorted(cells, key=lambda cell: cell[1]), lambda cell: cell[1]):
                usual = asyncio.run(undisturbed(server, MOMENTS[moment].requests(seed)))
                turns = list(of_moment) * rounds
                for number, (victim, _) in enumerate(turns):
                    asyncio.run(play(server, victim, moment, usual, tally, seed + number))
            tally.wrong += tracebacks(server.log)


def main() -> int:
    """Exit code 0 when every stream of every round was whole and as undisturbed."""
    parser = argparse.ArgumentParser(prog="make test-kill-matrix")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", nargs="+", choices=list(MOMENTS), default=list(MOMENTS))
    parser.add_argument("--victims", nargs="+", choices=list(VICTIMS), default=list(VICTIMS))
    arguments = parser.parse_args()
    tally, moments, victims = Tally(), arguments.moments, arguments.victims
    run(moments, victims, max(1, arguments.rounds // (len(victims) * len(moments))), arguments.seed, tally)
    for victim, moment in itertools.product(victims, moments):
        cell = victim, moment
        print(f"{victim:22} {moment:16} {tally.rounds[cell]} rounds, {tally.reached[cell]} in that moment")
    for line in tally.wrong:
        print(f"wrong: {line}")
    print(f"kill matrix: {sum(tally.rounds.values())} rounds, {tally.streams} streams, {tally.differ} differ, "
          f"{tally.broken} of killed front ends broke, {tally.moved} continued on another core")  # fmt: skip
    return 1 if tally.wrong or any(not tally.reached[cell] for cell in tally.rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
