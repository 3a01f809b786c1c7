"""Ranks are killed under streams: every answer is compared. `python -m tests.parallel.kills --count 20`.

Rank 0, which is the engine core's process, and the others take turns; `--stages 2` divides the model by layers, too.
The last line is the number of answers that differ.
"""

from __future__ import annotations

import argparse
import asyncio
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
    parser.add_argument("--experts", action="store_true", help="a small Mixtral, with whole experts on the ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.experts:
            CASES["mixtral"].write(Path(directory))
        sys.exit(kill(args, directory if args.experts else "leaf", WHOLE if args.experts else {}))


def kill(args: argparse.Namespace, model: str, settings: Mapping[str, Any]) -> int:
    """Kill ranks of an engine one by one; 1 = answers differ."""
    rng = random.Random(args.seed)
    requests = serving.make_requests(16, 60)
    expected = serving.expected_answers(model, requests)
    sizes = {"tensor_parallel_size": args.ranks, "pipeline_parallel_size": args.stages}
    engine = AsyncLLM.from_config(build_config(model=model, **sizes, **settings, **serving.SETTINGS))
    num_kills = [0] * args.ranks * args.stages

    def victim(engine: AsyncLLM) -> int | None:
        assert engine.core_pid is not None
        rank = sum(num_kills) % len(num_kills)
        num_kills[rank] += 1
        return engine.core_pid if rank == 0 else children_of(engine.core_pid)[rank - 1]

    async def kill_one_by_one() -> int:
        """A request that meets too many deaths is ended, as one that causes them; so one for each round."""
        rounds = [serving.rounds(engine, requests, expected, 1, rng, victim=victim) for _ in range(args.count)]
        return sum([await one for one in rounds])

    num_different = asyncio.run(kill_one_by_one())
    engine.shutdown()
    print(f"kills by rank: {num_kills}")
    print(f"{num_different} answers differ")
    return int(num_different > 0)


if __name__ == "__main__":
    main()
