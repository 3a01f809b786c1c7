"""Random steps of the scheduler under every policy and mode, with the checks of its property tests at each step.

Arrivals, aborts, siblings that share a prompt, deadlines and scarce pages, against the pretended worker of
`tests/unit/scheduler/harness.py`. A mode is a set of settings that are drawn for each load; `MODES` is where features
add theirs. The figure printed last is the number of failures.

    python -m tests.robustness.scheduler_properties --steps 10000
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.stats import EventKind, RequestEvent
from quire.scheduler.policy import AGE_TOKENS
from tests.unit.scheduler.harness import FULL, Engine, expected_answer, make_request, make_scheduler

POLICIES = ("fcfs", "priority", "fair", "shortest")
MAX_MODEL_LEN = 60
STEPS_OF_A_LOAD = 250
MAX_DRAIN_STEPS = 20_000
SHARED_TEXTS = ([3] * 40, [3, 3, 3, 3, 4, 5, 6, 7, 8, 9] * 4)

Settings = dict[str, Any]


def roomy(rng: random.Random) -> Settings:
    """Rows are short, pages are not."""
    return {"num_blocks": 120, "block_size": rng.randint(1, 8), "max_num_seqs": rng.randint(1, 6)}


def scarce(rng: random.Random) -> Settings:
    """Pages run out all the time."""
    block_size = rng.randint(1, 6)
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.randint(1, 12)
    return {"num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": rng.randint(3, 12)}


def greedy(rng: random.Random) -> Settings:
    """As scarce, and requests are admitted before their whole prompt has pages."""
    return {**scarce(rng), "reserve_full_prompt": False, "watermark": rng.choice([0.0, 0.1])}


def paced(rng: random.Random) -> Settings:
    """Prompts are cut by the pace of decoding requests, by a cap and by small steps."""
    return {
        **roomy(rng),
        "budget": rng.randint(1, 20),
        "max_decode_slowdown": rng.choice([None, 1.0, 2.0]),
        "max_inter_token_latency_ms": rng.choice([0.0, 5.0, 50.0]),
        "long_prefill_token_threshold": rng.choice([0, 1, 7]),
    }


def uncut(rng: random.Random) -> Settings:
    """Prompts are computed whole, without a prefix cache."""
    return {**scarce(rng), "enable_chunked_prefill": False, "budget": MAX_MODEL_LEN + 10, "prefix_caching": False}


def swapped(rng: random.Random) -> Settings:
    """As scarce, with a swap space."""
    return {**scarce(rng), "num_swap_blocks": rng.choice([3, 20, 200]), "preemption_mode": rng.choice(["auto", "swap"])}


def windowed(rng: random.Random) -> Settings:
    """Layers that see a window or a chunk of the tokens, beside layers that see all of them or alone."""
    local = [(rng.choice(["window", "chunk"]), rng.randint(1, 12)) for _ in range(rng.randint(1, 2))]
    groups = [FULL, *local] if rng.random() < 0.6 else local
    base = scarce(rng)
    return {**base, "num_blocks": base["num_blocks"] * len(groups), "groups": tuple(groups)}


MODES: dict[str, Callable[[random.Random], Settings]] = {
    "roomy": roomy, "scarce": scarce, "greedy": greedy, "paced": paced, "uncut": uncut, "swapped": swapped,
    "windowed": windowed,
}  # fmt: skip
"""Settings of `make_scheduler`, by the name of a mode."""


@dataclass
class Load:
    """One scheduler under random requests.

    Attributes:
        requests: accepted ones, by handle.
        may_wait_in_vain: handles with a deadline.
        num_events_before: events of the engine when a request that shares no fork group arrived, by handle.
    """

    rng: random.Random
    engine: Engine
    requests: dict[int, EngineCoreRequest] = field(default_factory=dict)
    may_wait_in_vain: set[int] = field(default_factory=set)
    num_events_before: dict[int, int] = field(default_factory=dict)

    def arrive(self, handles: itertools.count[int]) -> None:
        """One request, or several with one prompt."""
        rng = self.rng
        shared = rng.choice(SHARED_TEXTS)[: rng.randint(0, 25)]
        prompt = shared + [rng.randint(1, 3) for _ in range(rng.randint(0, 12))] or [1]
        group = [next(handles) for _ in range(rng.choice([1, 1, 1, 1, 3]))]
        salt, tenant = rng.choice([None, None, "salt"]), rng.choice(["", "a", "b", "c"])
        timeout = rng.choice([0.0, 0.0, 0.0, 60.0])
        for handle in group:
            request = make_request(
                handle, prompt,
                max_tokens=rng.choice([None, *range(1, 25)]), ignore_eos=rng.random() < 0.5,
                stop_token_ids=rng.choice([None, [rng.randint(1, 49) for _ in range(3)]]),
                cache_salt=salt, priority=rng.choice([0, 0, -1, 5]), tenant=tenant,
                weight=rng.choice([1.0, 0.5, 4.0]), tenant_policy=rng.choice(["fcfs", "priority", "shortest"]),
                queue_timeout_s=timeout, fork_group=group[0] if len(group) > 1 else None,
            )  # fmt: skip
            if len(group) == 1:
                self.num_events_before[handle] = len(self.engine.events)
            self.engine.add(request)
            self.requests[handle] = request
            if timeout:
                self.may_wait_in_vain.add(handle)

    def step(self, handles: itertools.count[int]) -> None:
        """Whatever happens between two steps, and a step."""
        rng, engine = self.rng, self.engine
        num_open = len(self.requests) - len(engine.finished)
        if rng.random() < (0.5 if num_open < 20 else 0.05):
            self.arrive(handles)
        unfinished = [handle for handle in self.requests if handle not in engine.finished]
        some = [rng.choice(unfinished)] if unfinished and rng.random() < 0.03 else []
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        if rng.random() < 0.5:
            engine.abort(*some)
            some = []
        engine.step(some)

    def check_bound(self) -> None:
        """Under `shortest`, fewer later requests start while one waits, stopped or not, than its work allows."""
        for handle, num_before in self.num_events_before.items():
            request = self.requests[handle]
            if self.engine.finished[handle].finish_reason in (FinishReason.ABORT, FinishReason.QUEUE_TIMEOUT):
                continue  # it stopped waiting at a time that no event tells
            work = len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0)
            passed_by = later_starts(self.engine.events[num_before:], handle)
            assert len(passed_by) < max(1, work / AGE_TOKENS), f"{handle} was passed by {sorted(passed_by)}"

    def check_answers(self) -> None:
        """Every request ended, with its own answer or with a beginning of it."""
        assert self.engine.finished.keys() == self.requests.keys(), "a request never ended"
        for handle, request in self.requests.items():
            answer, end = expected_answer(request, MAX_MODEL_LEN)
            got, reason = self.engine.tokens[handle], self.engine.finished[handle].finish_reason
            if reason is FinishReason.ABORT:
                assert got == answer[: len(got)]
            elif reason is FinishReason.QUEUE_TIMEOUT:
                assert handle in self.may_wait_in_vain and not got, "one that had started was ended for its wait"
            else:
                assert (got, self.engine.finished[handle]) == (answer, end)
        assert self.engine.scheduler._kv.usage == 0.0, "a page is still in use"


def later_starts(events: Sequence[RequestEvent], handle: int) -> set[int]:
    """Who of those that came after `handle`, with which `events` begin, got a first turn while that one waited."""
    started, seen, is_waiting = set(), set(range(handle)), True
    for event in events:
        if event.handle == handle and event.kind in (EventKind.SCHEDULED, EventKind.PREEMPTED):
            is_waiting = event.kind is EventKind.PREEMPTED
        elif event.kind is EventKind.SCHEDULED and event.handle not in seen:
            seen.add(event.handle)
            started |= {event.handle} if is_waiting else set()
    return started


def any_duration(rng: random.Random) -> Callable[[Any], float | None]:
    """Seconds of a step that follow no law; None = not measured."""
    return lambda scheduled: rng.choice([None, 0.0, 1e-9, 0.01, 0.02, 0.05, 1e6])


def run_load(policy: str, mode: str, seed: int, num_steps: int) -> int:
    """One load of so many steps and then to its end; returns the number of steps."""
    rng = random.Random(f"{policy} {mode} {seed}")
    settings = {"budget": rng.randint(1, 50), "max_model_len": MAX_MODEL_LEN, **MODES[mode](rng)}
    settings.setdefault("prefix_caching", rng.random() < 0.7)
    engine = Engine(
        make_scheduler(**settings, scheduling_policy=policy),
        duration=any_duration(rng),
        budget=settings["budget"],
        groups=settings.get("groups", (FULL,)),
    )
    load, handles = Load(rng, engine), itertools.count()
    for _ in range(num_steps):
        load.step(handles)
    engine.run(MAX_DRAIN_STEPS)
    load.check_answers()
    if policy == "shortest":
        load.check_bound()
    return len(engine.scheduled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of each policy and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    num_failed = 0
    for policy, mode in itertools.product(args.policy, args.mode):
        start, num_steps, seed = time.perf_counter(), 0, args.seed
        num_of_load = min(STEPS_OF_A_LOAD, args.steps)
        while num_steps < args.steps:
            try:
                num_steps += run_load(policy, mode, seed, num_of_load)
            except Exception:  # what went wrong is the finding
                num_failed += 1
                print(f"FAILED: --policy {policy} --mode {mode} --seed {seed} --steps {num_of_load}", flush=True)
                traceback.print_exc()
                num_steps += num_of_load
            seed += 1
        seconds = time.perf_counter() - start
        print(f"{policy}, {mode}: {num_steps} steps, {seed - args.seed} loads, {seconds:.0f} s", flush=True)
    print(json.dumps({"steps_of_each": args.steps, "failed": num_failed}))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
