"""`make test-combinations`: settings drawn at random, of those that may change no byte, against an engine with none.

    python -m tests.parallel.combinations --count 200 --seed 0

A case is a model with a format of weights and of the cache, and a draw of ranks, stages, drafts, tiers, preemption,
sizes of steps and pools. Its answers (`circumstances.requests`: greedy, drawn, several a request, with penalties,
grammars and log-probabilities, twice, so that prefixes are cached) must be those of one rank by itself, bits of
log-probabilities included. What is refused at start is counted by its reason. The last line is the number that differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import QuireClientError
from tests.models.families.cases import CASES
from tests.models.mixtures import MIXTURES
from tests.parallel.circumstances import Answers, answers

LEAF = "leaf"
HEADS = ("draft_model", "eagle", "medusa")
TREE = "[(0,), (1,), (0, 0), (0, 1)]"
# A drawn value leaves the setting as it is where it is None.
SIZES_OF_STEPS: Mapping[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (None, None, 9, 33, 64, 512),
    "max_num_seqs": (None, None, 1, 2, 5, 16),
    "long_prefill_token_threshold": (None, None, 5, 30),
    "enforce_eager": (None, None, True),
    "num_threads": (None, None, 2),
    "enable_prefix_caching": (None, None, False),
    "scheduling_policy": (None, None, "priority", "fair", "shortest"),
}
POOLS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"num_gpu_blocks_override": 26, "scheduler_reserve_full_isl": False},
    {"num_gpu_blocks_override": 40, "scheduler_reserve_full_isl": False, "preemption_mode": "recompute"},
    {"num_gpu_blocks_override": 26, "scheduler_reserve_full_isl": False, "preemption_mode": "swap", "swap_space": 0.05},
)
TIERS: tuple[Mapping[str, Any], ...] = ({}, {}, {"kv_offloading_size": 0.05}, {"kv_disk": True})


@dataclass(frozen=True)
class Case:
    """One engine, and what it is compared with.

    Attributes:
        name: of the model.
        basis: settings that decide about bits: the other engine has them, too.
        changes: settings that may not.
    """

    name: str
    basis: tuple[tuple[str, Any], ...]
    ranks: int
    stages: int
    structured: bool
    changes: Mapping[str, Any] = field(hash=False)

    def __str__(self) -> str:
        given = {**dict(self.basis), **self.changes}
        return f"{self.name}, {self.ranks} x {self.stages}, structured={self.structured}, {given}"


def draw(rng: random.Random, names: tuple[str, ...]) -> Case:
    """A case; half of them of `leaf`, which has heads."""
    name = LEAF if rng.random() < 0.5 else rng.choice(names)
    basis = {"dtype": "bfloat16"}
    if quantization := rng.choice((None, None, "int8", "int4")):
        basis["quantization"] = quantization
    if rng.random() < 0.15:
        basis["kv_cache_dtype"] = "fp8_e4m3"
    changes = {key: value for key, values in SIZES_OF_STEPS.items() if (value := rng.choice(values)) is not None}
    changes.update(rng.choice(POOLS))
    if tier := rng.choice(TIERS):
        changes |= {**tier, "enable_prefix_caching": True}
    if drafts := draw_drafts(rng, name):
        changes["speculative_config"] = drafts
    if name in MIXTURES and rng.random() < 0.6:
        changes["enable_expert_parallel"] = True
    ranks, stages = rng.choice((1, 1, 2, 2, 3, 4, 8)), rng.choice((1, 1, 2, 3))
    return Case(name, tuple(basis.items()), ranks, 1 if ranks == 8 else stages, name == LEAF, changes)


def draw_drafts(rng: random.Random, name: str) -> dict[str, Any] | None:
    """Some `speculative_config`."""
    if rng.random() < 0.4:
        return None
    method: Any = rng.choice(("suffix", "ngram", *(HEADS if name == LEAF else ())))
    found: dict[str, Any] = {"method": method}
    if method == "medusa" and rng.random() < 0.5:
        found["speculative_token_tree"] = TREE
    elif rng.random() < 0.6:
        found["num_speculative_tokens"] = rng.choice((1, 2, 3, 7))
    if rng.random() < 0.6:
        found["enable_adaptive_verification"] = False
    if method in HEADS and rng.random() < 0.2:
        found = {**found, "method": ["suffix", method]}
        found.pop("speculative_token_tree", None)
    return found


class Bench:
    """Models in a directory, and the answers that they give by themselves."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._expected: dict[tuple[Any, ...], Answers] = {}
        self._num_disks = 0

    def differs(self, case: Case) -> bool:
        """Whether a case's answers are others than those of its basis."""
        key = (case.name, case.basis)
        if key not in self._expected:
            self._expected[key] = self._answers(case, 1, 1, {})
        changes = dict(case.changes)
        if changes.get("kv_disk"):
            self._num_disks += 1
            changes |= {"kv_disk": str(self._directory / f"disk{self._num_disks}")}
        return self._answers(case, case.ranks, case.stages, changes) != self._expected[key]

    def _answers(self, case: Case, ranks: int, stages: int, changes: Mapping[str, Any]) -> Answers:
        settings: dict[str, Any] = dict(case.basis)
        vocab_size, path = 3000, Path(LEAF)
        if case.name != LEAF:
            family = CASES[case.name]
            vocab_size, path = 320, self._directory / case.name.replace("/", "-")
            if not path.exists():
                family.write(path)
            settings |= family.settings
        model = LEAF if case.name == LEAF else path
        return answers(model, vocab_size, ranks, num_stages=stages, structured=case.structured, **settings, **changes)


def main() -> None:
    """Run `--count` cases."""
    parser = argparse.ArgumentParser(prog="make test-combinations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, by its number")
    args = parser.parse_args()
    names, refused, num_different, num_failed = tuple(CASES), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for number in range(args.count) if args.only is None else (args.only,):
            case = draw(random.Random(f"{args.seed} {number}"), names)
            start = time.perf_counter()
            try:
                is_different = bench.differs(case)
                said = "DIFFERS" if is_different else "the same"
                num_different += is_different
            except QuireClientError as error:
                refused[error.message[:100]] += 1
                said = f"refused: {error.message}"
            except Exception as error:  # whatever an engine may raise is what is looked for
                num_failed += 1
                said = f"FAILED: {type(error).__name__}: {error}"
            print(f"{number}: {case}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
    for reason, count in refused.most_common():
        print(f"refused {count} times: {reason}")
    num_run = (args.count if args.only is None else 1) - refused.total() - num_failed
    print(f"{num_failed} failed; {num_different} of {num_run} differ")
    sys.exit(num_different + num_failed > 0)


if __name__ == "__main__":
    main()
