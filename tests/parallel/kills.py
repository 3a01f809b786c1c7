"""Ranks are killed under streams: every answer is compared. `python -m tests.parallel.kills --count 20`.

Rank 0, which is the engine core's process, and the others take turns; `--stages 2` divides the model by layers, too.
The last line is the number of answers that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from tests.e2e import serving
from tests.models.families.cases import CASES
from tests.parallel.circumstances import WHOLE
from tests.parallel.ranks import children_of


def main() -> None:
    """Kill, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, help="more than one: they share experts; cores are killed")
    parser.add_argument("--experts", action="store_true", help="a small Mixtral, with whole experts on the ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        has_experts = args.experts or args.replicas > 1
        if has_experts:
            CASES["mixtral"].write(Path(directory))
        sys.exit(kill(args, directory if has_experts else "leaf", WHOLE if has_experts else {}))


def kill(args: argparse.Namespace, model: str, settings: Mapping[str, Any]) -> int:
    """Kill ranks of an engine one by one; 1 = answers differ."""
    rng = random.Random(args.seed)
    requests = serving.make_requests(16, 60)
    expected = serving.expected_answers(model, requests)
    sizes = {
        "tensor_parallel_size": args.ranks, "pipeline_parallel_size": args.stages, "data_parallel_size": args.replicas,
    }  # fmt: skip
    engine = AsyncLLM.from_config(build_config(model=model, **sizes, **settings, **serving.SETTINGS))
    per_replica = args.ranks * args.stages
    num_kills = [0] * per_replica * args.replicas

    def victim(engine: AsyncLLM) -> int | None:
        number = sum(num_kills) % len(num_kills)
        num_kills[number] += 1
        replica, rank = divmod(number, per_replica)
        core_pid = children_of(os.getpid())[replica] if args.replicas > 1 else engine.core_pid
        assert core_pid is not None
        return core_pid if rank == 0 else children_of(core_pid)[rank - 1]

    async def kill_one_by_one() -> int:
        """A request that meets too many deaths is ended, as one that causes them; so one for each round."""
        rounds = [serving.rounds(engine, requests, expected, 1, rng, victim=victim) for _ in range(args.count)]
        return sum([await one for one in rounds])

    num_different = asyncio.run(kill_one_by_one())
    engine.shutdown()
    print(f"kills by rank, replica by replica: {num_kills}")
    print(f"{num_different} answers differ")
    return int(num_different > 0)


if __name__ == "__main__":
    main()
