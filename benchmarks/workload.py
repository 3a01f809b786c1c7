"""The cases that every engine runs, and how they are timed: equal work, so that a ratio means something.

Imported by the programs under `benchmarks/engine` and `benchmarks/peers`; needs nothing but Python, so it runs in any
engine's environment. No state.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]

FIRST_ID, LAST_ID = 5, 30000
"""Prompts are made of ids that every checkpoint of `benchmarks/checkpoints.py` has and that mean nothing special."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at once, each with a prompt and an output of so many tokens.

    Attributes:
        rounds: how often it is timed, with fresh prompts; the median counts.
        has_split: also time the same prompts with one output token, to part decoding from prefill.
    """

    name: str
    num_reqs: int
    prompt_len: int
    output_len: int
    rounds: int = 1
    has_split: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return self.num_reqs * self.output_len

    def __str__(self) -> str:
        return f"{self.name}: {self.num_reqs} x ({self.prompt_len} in, {self.output_len} out)"


CASES = {
    case.name: case
    for case in (
        Case("stream", 1, 32, 64, rounds=3, has_split=True),
        Case("decode16", 16, 16, 128, has_split=True),
        Case("decode64", 64, 16, 128, has_split=True),
        Case("batch8", 8, 128, 64),
        Case("batch32", 32, 128, 64),
        Case("batch64", 64, 256, 64),
        Case("prefill1024", 1, 1024, 1, rounds=3),
    )
}
LONG_CASES = {
    case.name: case for case in (Case("prefill7000", 1, 7000, 1, rounds=3), Case("prefill8x3000", 8, 3000, 1, rounds=3))
}
"""Run where they are named."""
WARM_UP = Case("warm-up", 2, 32, 8)


def longest_sequence(cases: Iterable[Case]) -> int:
    """Tokens per request that an engine must allow for the cases."""
    return max(2048, *(case.prompt_len + case.output_len + 64 for case in cases))


def random_prompts(rng: random.Random, num_reqs: int, prompt_len: int) -> Prompts:
    """Prompts that share nothing with each other or with earlier ones."""
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_len)] for _ in range(num_reqs)]


def load_average() -> float:
    """Processes that wanted the machine during the last minute."""
    return os.getloadavg()[0]


def pick_cases(names: str) -> list[Case]:
    """Cases by name, separated by commas, or "all", without the long ones.

    Raises:
        SystemExit: a name is unknown.
    """
    known = {**CASES, **LONG_CASES}
    wanted = list(CASES) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"unknown case {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def time_case(case: Case, generate: Generate, rng: random.Random) -> dict[str, float]:
    """Run one case through `generate(prompts, output_len) -> tokens made`.

    Returns:
        seconds (median of the rounds), output tokens per second (of a case with one output token: prompt tokens per
        second), and where the case is split the seconds of the first token and the tokens per second after it.
    """
    whole, first = [], []
    for _ in range(case.rounds):
        prompts = random_prompts(rng, case.num_reqs, case.prompt_len)
        if case.has_split:
            first.append(_seconds(generate, prompts, 1))
        whole.append(_seconds(generate, prompts, case.output_len))
    return figures_of(case, statistics.median(whole), statistics.median(first) if first else None)


def figures_of(case: Case, seconds: float, first_s: float | None = None) -> dict[str, float]:
    """What a case of `seconds`, of which `first_s` until every request had its first token, comes to."""
    if case.output_len == 1:
        rate = {"prompt_tokens_per_s": case.num_reqs * case.prompt_len / seconds}
    else:
        rate = {"tokens_per_s": case.num_output_tokens / seconds}
    if first_s is not None:
        rate["first_token_s"] = first_s
        rate["decode_tokens_per_s"] = case.num_reqs * (case.output_len - 1) / (seconds - first_s)
    return {"seconds": seconds, **rate, "load": load_average()}


def run_cases(cases: Iterable[Case], generate: Generate, seed: int = 0) -> dict[str, dict[str, float]]:
    """Warm up, then time the cases one after another, printing a line for each."""
    rng = random.Random(seed)
    _seconds(generate, random_prompts(rng, WARM_UP.num_reqs, WARM_UP.prompt_len), WARM_UP.output_len)
    results = {}
    for case in cases:
        results[case.name] = time_case(case, generate, rng)
        print_case(case, results[case.name])
    return results


def print_case(case: Case, figures: dict[str, float]) -> None:
    """One line: `CASE <what>: <figures>`."""
    print(f"CASE {case}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)


def print_json(results: object) -> None:
    """The last line of every benchmark: one JSON object, floats to five digits."""
    print(json.dumps(_rounded(results)), flush=True)


def _seconds(generate: Generate, prompts: Prompts, output_len: int) -> float:
    start = time.perf_counter()
    made = generate(prompts, output_len)
    seconds = time.perf_counter() - start
    assert made == len(prompts) * output_len, f"the engine made {made} tokens, not {len(prompts)} x {output_len}"
    return seconds


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value
