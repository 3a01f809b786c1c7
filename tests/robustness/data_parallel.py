"""`make bench-data-parallel`: replicas under a flood of one tenant, on a virtual clock, with the real schedulers.

Three tenants of weights 1, 1 and 2 send more than the replicas can do, each with conversations of its own that begin
with a common prompt; one of them floods. Then one tenant may use a single replica alone (`X-data-parallel-rank`), where
fair shares hold only if replicas know of each other's service. Shares are counted while all tenants wait. Everything is
a count: how busy the machine is does not matter. No model: what is tried is placement, fairness across replicas and the
schedulers. At the end replicas are added and removed under streams of an engine whose cores are in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.engine.data_parallel.shared_service import SharedService
from quire.scheduler.placement import Placement
from quire.scheduler.setup import make_scheduler
from tests.server.replicas import Fleet, expected
from tests.unit.scheduler.harness import make_setup

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, BUDGET, MAX_LEN = 16, 1200, 16, 256, 1024
PREFIX_TOKENS, OUTPUT_TOKENS = 256, (16, 48)
NUM_PREFIXES = 8
STEP_S, TOKEN_S = 1e-3, 5e-5
WEIGHTS = {"flood": 1.0, "steady": 1.0, "double": 2.0}
MOST_AT_ONCE = {"flood": 400, "steady": 48, "double": 96}


@dataclass
class Course:
    """What came of a run.

    Attributes:
        service: of each tenant while all waited, by weight: prompt tokens computed and twice those made.
        num_queries, num_hits: prompt tokens, and those found in a prefix cache.
        num_ended: requests that ended whole.
        by_replica: requests, by replica.
    """

    service: Counter[str] = field(default_factory=Counter)
    num_queries: int = 0
    num_hits: int = 0
    num_ended: int = 0
    by_replica: Counter[int] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_queries)

    @property
    def unfairness(self) -> float:
        """The farthest that a tenant's service by weight is from the mean, relative to it."""
        per_weight = [self.service[name] / weight for name, weight in WEIGHTS.items()]
        mean = sum(per_weight) / len(per_weight)
        return max(abs(one - mean) for one in per_weight) / mean

    def describe(self) -> str:
        """One line."""
        return (f"unfairness {100 * self.unfairness:.1f}%, prefix hits {100 * self.hit_rate:.1f}%, "
                f"requests by replica {dict(sorted(self.by_replica.items()))}")  # fmt: skip


class SimReplica:
    """A real scheduler and a pretended worker, on a clock of its own."""

    def __init__(self) -> None:
        setup = make_setup(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, max_num_seqs=MAX_NUM_SEQS,
            budget=BUDGET, scheduling_policy="fair",
        )  # fmt: skip
        self.now_s = 0.0
        self.scheduler = make_scheduler(setup, lambda: self.now_s)

    def step(self) -> EngineCoreOutputs | None:
        """One step; its tokens say nothing."""
        step = self.scheduler.schedule()
        if step is None:
            return self.scheduler.take_outputs()
        output = step.output
        rows = output.rows[output.is_sampling]
        self.now_s += STEP_S + TOKEN_S * output.total_num_scheduled_tokens
        sampled = ModelRunnerOutput(rows=rows, sampled_token_ids=np.full(len(rows), 7, dtype=np.int32))
        return self.scheduler.update_from_output(step, sampled)


class Load:
    """Closed loops of tenants: each has so many requests under way, and the next come as these end."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = {name: [self._tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)] for name in WEIGHTS}
        self.tenant_of: dict[int, str] = {}

    def next(self, tenant: str) -> EngineCoreRequest:
        """A request of `tenant`."""
        handle = len(self.tenant_of)
        self.tenant_of[handle] = tenant
        prompt = self._rng.choice(self._prefixes[tenant]) + self._tokens(self._rng.randint(8, 64))
        params = SamplingParams(max_tokens=self._rng.randint(*OUTPUT_TOKENS), ignore_eos=True, detokenize=False)
        return EngineCoreRequest(
            handle=handle, request_id=str(handle), prompt_token_ids=np.array(prompt, dtype=np.int32),
            sampling_params=params, seed=handle, tenant=tenant, tenant_weight=WEIGHTS[tenant],
        )  # fmt: skip

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randint(10, 900) for _ in range(count)]


def run(num_replicas: int, num_requests: int, *, seed: int = 0, shares: bool = True, pinned: str = "") -> Course:
    """Serve until `num_requests` have ended.

    Args:
        shares: replicas are told what the others served; False is what they do by themselves.
        pinned: tenant whose requests ask for replica 0; "" = none.
    """
    course, load, service = Course(), Load(seed), SharedService()
    placement = Placement(NUM_BLOCKS * BLOCK_SIZE, is_fair=True)
    replicas = [SimReplica() for _ in range(num_replicas)]
    for index in range(num_replicas):
        placement.add_replica(index)
        service.add_replica(index)

    def send(tenant: str) -> None:
        request = load.next(tenant)
        index = placement.place(request, [0] if tenant == pinned else range(num_replicas))
        counters = service.add(request, index)
        if shares:
            replicas[index].scheduler.service.take_over(counters.counters)
        replicas[index].scheduler.add_request(request)
        course.by_replica[index] += 1

    for name, count in MOST_AT_ONCE.items():
        for _ in range(count):
            send(name)
    warm_up = num_requests // 4
    while course.num_ended < num_requests:
        index = min(range(num_replicas), key=lambda one: replicas[one].now_s)
        outputs = replicas[index].step()
        if outputs is None:
            replicas[index].now_s += STEP_S
            continue
        _count(course, outputs, load, is_measured=course.num_ended >= warm_up)
        for handle in outputs.handles.tolist():
            placement.note_first_token(handle)
        service.note_step(index, outputs)
        for other, counters in service.due() if shares else ():
            replicas[other].scheduler.service.take_over(counters.counters)
        for end in outputs.finished:
            placement.remove(end.handle)
            course.num_ended += 1
            send(load.tenant_of[end.handle])
    return course


def _count(course: Course, outputs: EngineCoreOutputs, load: Load, *, is_measured: bool) -> None:
    stats = outputs.stats
    course.num_queries += stats.prefix_cache_queries
    course.num_hits += stats.prefix_cache_hits
    if is_measured:
        for handle in outputs.handles.tolist():
            course.service[load.tenant_of[handle]] += 2


async def resize(num_rounds: int) -> tuple[int, int, int]:
    """Add and remove replicas of an engine whose cores are turned by hand, while streams run.

    Returns:
        Streams, those that were not as on one replica, and answers that went on at another core.
    """
    fleet, answered, wrong = Fleet(2), 0, 0
    prompts = [[i + 5] * (6 + i) for i in range(12)]
    try:
        for number in range(num_rounds):
            size = (3, 1, 2)[number % 3]
            streams = [await fleet.open(prompt, 24, f"{number}-{i}") for i, prompt in enumerate(prompts)]
            await fleet.turn(4)
            scaling = asyncio.ensure_future(fleet.engine.scale(size, 0.0))  # what leaves finishes nothing
            answers = await fleet.finish(streams)
            await scaling
            answered += len(answers)
            wrong += sum(found != expected(prompt, 24) for found, prompt in zip(answers, prompts, strict=True))
        return answered, wrong, fleet.engine.num_resumed
    finally:
        fleet.shutdown()


def main() -> int:
    """Print the counts; 1 when a line does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    one = run(1, args.requests // 2, seed=args.seed)
    print(f"1 replica: {one.describe()}")
    apart = run(2, args.requests, seed=args.seed, pinned="steady", shares=False)
    print(f"2 replicas, one tenant at one of them, counters apart: {apart.describe()}")
    pinned = run(2, args.requests, seed=args.seed, pinned="steady")
    print(f"2 replicas, one tenant at one of them: {pinned.describe()}")
    free = run(2, args.requests, seed=args.seed)
    print(f"2 replicas: {free.describe()}")
    streams, wrong, moved = asyncio.run(resize(args.requests // 100))
    print(f"replicas added and removed {args.requests // 100} times: {streams} streams, {moved} moved, {wrong} wrong")
    unfairness, hits = max(free.unfairness, pinned.unfairness), free.hit_rate / one.hit_rate
    print(
        f"data parallel: unfairness {100 * unfairness:.2f}% (at most 5; {100 * apart.unfairness:.0f} counted apart), "
        f"prefix hits {100 * hits:.1f}% of one replica's (at least 90), {wrong} of {streams} streams wrong"
    )
    return 0 if unfairness <= 0.05 and hits >= 0.9 and not wrong and moved else 1


if __name__ == "__main__":
    sys.exit(main())
