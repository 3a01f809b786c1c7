"""`make test-speculation`: the same bytes with drafts, of every method, for every kind of request, on every tier.

Requests of all kinds in turn (`speculated_requests`) are answered without drafts, then by each method of
`drafting_methods.ALL_METHODS` in each of `CIRCUMSTANCES`; tokens, texts, ends and the bits of log-probabilities must be
equal. On the best tier of the machine `leaf` answers COUNT requests by every method in every circumstance, and random
weights of the shape of a 0.5B model a tenth, preempted. On the other tiers in bfloat16, and on the best one in int8 and
int4, every method is tried with a tenth; on every pair of a tier and a format, and with a cache of eight bits, a few of
them. Drafts of every method must have been verified, some right, some wrong; where there are enough requests, for every
kind. What is done is kept in DIRECTORY/results.jsonl and not done again while the engine is the same.

The last line is the number of answers that differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from quire import LLM, RequestOutput
from quire.models.hub import resolve_model_path
from tests.models.checkpoints import CHAT_TEMPLATE
from tests.robustness.drafting_methods import ALL_METHODS, ORACLE, Drafters, Target, shipping_heads
from tests.robustness.killed_drafts import kill_in_the_middle
from tests.robustness.oracle import Oracle, drafting
from tests.robustness.speculated_requests import Answer, Asked, answer_of, generate, make_requests, sequences

ROOT = Path(__file__).parents[2]
# A machine that is busy compiles grammars slowly, and threads that wait for each other are slower than one.
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 24, "block_size": 16, "max_num_batched_tokens": 512, "num_threads": 1,
    "structured_outputs_compile_timeout": 60.0, "speculative_config": "off",
}  # fmt: skip
PREEMPTED, SWAPPED, ALONE = "preempted", "swapped", "alone"
PLAIN = "room for all, then prefix hits"
SMALL_POOL = {"num_gpu_blocks_override": 60}
CONTROLLED, KILLED = "as the controller says", "core killed mid-stream"
# Circumstance -> settings, and how often the requests are answered: the second time from the prefix cache.
CIRCUMSTANCES: dict[str, tuple[dict[str, Any], int]] = {
    PLAIN: ({}, 2),
    ALONE: ({"max_num_seqs": 1}, 1),
    PREEMPTED: ({**SMALL_POOL, "preemption_mode": "recompute"}, 1),
    SWAPPED: ({**SMALL_POOL, "preemption_mode": "swap", "swap_space": 0.05}, 1),
    "prompts in chunks of 24": ({"max_num_batched_tokens": 24, "max_num_seqs": 7}, 1),
    CONTROLLED: ({}, 1),
    KILLED: ({"max_num_seqs": 96}, 1),
}
BFLOAT16, FP8_CACHE = "bfloat16", "fp8 cache"
# What is stored -> settings. All tiers compute weights in these formats; the cache's is the same for all.
FORMATS: dict[str, dict[str, Any]] = {
    BFLOAT16: {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    FP8_CACHE: {"kv_cache_dtype": "fp8_e4m3"},
}  # fmt: skip
SAMPLE = (ORACLE, "draft_model", "suffix, else eagle")
"""Methods that are tried with every pair of a tier and a format."""
MANY = 20
"""Requests of a kind that are enough for some draft to stand, and some not, whatever drafts."""


@dataclass
class Outcome:
    """What a method in a circumstance came to.

    Attributes:
        num_answers: that were compared.
        different: kind -> answers that differ.
        drafted, accepted: kind -> draft tokens that were verified, and those of them that stood.
        wrong: what should have happened and did not.
        seconds: that it took.
    """

    num_answers: int = 0
    different: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, requests: Sequence[Asked], expected: Sequence[Answer], outputs: Sequence[RequestOutput]) -> None:
        """Compare answers."""
        for asked, want, output in zip(requests, expected, outputs, strict=True):
            self.num_answers += 1
            self.different[asked.kind] += answer_of(output) != want
            for one in output.outputs:
                if one.spec_decode_metrics is not None:
                    self.drafted[asked.kind] += one.spec_decode_metrics.num_drafted
                    self.accepted[asked.kind] += one.spec_decode_metrics.num_accepted

    def __str__(self) -> str:
        share = f"{self.accepted.total()} of {self.drafted.total()} drafts stood"
        return f"{self.num_answers} answers, {self.different.total()} differ, {share} ({self.seconds:.1f} s)"


def unproven(outcomes: Sequence[Outcome], requests: Sequence[Asked]) -> list[str]:
    """What a method's outcomes do not show: right and wrong drafts, of each kind that is asked often."""
    drafted: Counter[str] = sum((one.drafted for one in outcomes), Counter())
    accepted: Counter[str] = sum((one.accepted for one in outcomes), Counter())
    kinds = Counter(one.kind for one in requests)
    found = [
        f"{kind}: {accepted[kind]} of {drafted[kind]} drafts stood"
        for kind, count in kinds.items()
        if count >= MANY and not 0 < accepted[kind] < drafted[kind]
    ]
    if not 0 < accepted.total() < drafted.total():
        found.append(f"{accepted.total()} of {drafted.total()} drafts stood")
    return found


class Bench:
    """A model with its requests, and their answers without drafts.

    Args:
        directory: of models that draft for it.
        form: one of `FORMATS`.
    """

    def __init__(self, target: Target, count: int, directory: Path, form: str = BFLOAT16, seed: int = 0) -> None:
        self._target = target
        self._seed = seed
        self._settings = {**SETTINGS, **target.settings, **FORMATS[form]}
        with LLM(**self._settings) as llm:
            self.requests = make_requests(llm.llm_engine, count, seed, target.longest_prompt)
            self._expected = [answer_of(one) for one in generate(llm, self.requests)]
        self._sequences = sequences(self.requests, self._expected)
        self._drafters = Drafters(target, directory, [[*prompt, *output] for prompt, output in self._sequences])

    def run(self, method: str, circumstance: str) -> Outcome:
        """The requests by a method in a circumstance."""
        more, num_times = CIRCUMSTANCES[circumstance]
        outcome, start = Outcome(), time.monotonic()
        of_method = self._drafters.settings(method, is_controlled=circumstance == CONTROLLED)
        settings = {**self._settings, **of_method, **more}
        if circumstance == KILLED:
            happened = self._kill(outcome, settings)
        else:
            happened = self._answer(outcome, method, settings, num_times)
        if not happened.get(circumstance, True):
            outcome.wrong.append("that did not happen")
        outcome.seconds = time.monotonic() - start
        return outcome

    def _answer(self, outcome: Outcome, method: str, settings: dict[str, Any], num_times: int) -> dict[str, bool]:
        """Answer the requests so often; returns which circumstances there were."""
        with ExitStack() as stack:
            if method == ORACLE:
                vocab_size = self._target.config["vocab_size"]
                stack.enter_context(drafting(Oracle(self._sequences, vocab_size, seed=self._seed)))
            stack.enter_context(shipping_heads())
            llm = stack.enter_context(LLM(**settings))
            counts = _count_preemptions(llm)
            for _ in range(num_times):
                outputs = generate(llm, self.requests)
                outcome.add(self.requests, self._expected, outputs)
        is_swapped = counts["swapped"] > 0
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {PLAIN: num_cached > 0, PREEMPTED: not is_swapped and counts["preempted"] > 0, SWAPPED: is_swapped}

    def _kill(self, outcome: Outcome, settings: dict[str, Any]) -> dict[str, bool]:
        """Answer the requests by a core that is killed in the middle, and its successor."""
        num_tokens = sum(len(output) for _, output in self._sequences)
        killed = kill_in_the_middle(settings, self.requests, num_tokens // 2)
        outcome.add(self.requests, self._expected, killed.outputs)
        asked, cut = Counter(one.kind for one in self.requests), {self.requests[i].kind for i in killed.cut}
        outcome.wrong += [f"{kind}: none was cut" for kind, count in asked.items() if count >= MANY and kind not in cut]
        was_drafting = bool(cut) and killed.num_drafted_before > 0 and killed.num_drafted_after > 0
        return {KILLED: killed.num_restarts == 1 and was_drafting}


def _count_preemptions(llm: LLM) -> Counter[str]:
    """Counts while the engine steps: `preempted` requests, and those of them that were `swapped`."""
    engine, counts = llm.llm_engine, Counter[str]()
    step = engine.step

    def counting() -> Any:
        outputs = step()
        counts["preempted"] += engine.last_stats.num_preemptions
        counts["swapped"] += engine.last_stats.num_swap_preemptions
        return outputs

    engine.step = counting  # type: ignore[method-assign]
    return counts


# --- all of it, a process for each tier and format ---

LEAF, RANDOM = "leaf", "0.5B"


@dataclass(frozen=True)
class Part:
    """What one process does.

    Attributes:
        is_proof: drafts of each kind must have been right and wrong.
    """

    tier: str
    model: str
    form: str
    count: int
    methods: tuple[str, ...]
    circumstances: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.tier}, {self.model}, {self.form}"

    def key(self, method: str, circumstance: str) -> str:
        """Names a result of this tree."""
        return f"{self.name}, {method}, {circumstance}, {self.count} requests, tree {fingerprint()}"


@cache
def fingerprint() -> str:
    """Of the engine's files, so that no result of another one counts."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "quire").rglob("*.py"), *(ROOT / "quire").rglob("*.so")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def plan(tiers: Sequence[str], count: int) -> Iterator[Part]:
    """All parts, the largest first.

    Args:
        tiers: the best first.
        count: of requests to `leaf`.
    """
    every, tenth, few = tuple(ALL_METHODS), max(1, round(count / 10)), max(1, round(count / 100))
    others = tuple(name for name in every if name != ORACLE)  # the oracle is of this process
    here = tuple(name for name in CIRCUMSTANCES if name not in (CONTROLLED, KILLED))
    best = tiers[0]
    yield Part(best, LEAF, BFLOAT16, count, every, here)
    yield Part(best, LEAF, BFLOAT16, count, others, (CONTROLLED, KILLED))
    yield Part(best, RANDOM, BFLOAT16, tenth, every, (PREEMPTED,))
    yield Part(best, LEAF, FP8_CACHE, tenth, SAMPLE, (PLAIN, PREEMPTED))
    for tier in tiers:
        for form in (BFLOAT16, "int8", "int4"):
            if (tier, form) != (best, BFLOAT16):
                methods = every if tier == best or form == BFLOAT16 else SAMPLE
                yield Part(tier, LEAF, form, tenth, methods, (PLAIN,))
                yield Part(tier, LEAF, form, tenth, (ORACLE,), (ALONE, PREEMPTED, SWAPPED))
            if (tier == best) != (form == BFLOAT16):
                yield Part(tier, RANDOM, form, few, (ORACLE, "eagle"), (PLAIN,))


def make_target(model: str, directory: Path) -> Target:
    """`leaf`, or random weights of the shape of a 0.5B model, whose words are written to `directory`."""
    if model == LEAF:
        return Target(Path(resolve_model_path(LEAF, None, None)), {"model": LEAF})
    path = directory / "model"
    if not (path / "tokenizer_config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        importlib.import_module("benchmarks.engine.bench_structured").write_model(path)
        words = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": CHAT_TEMPLATE}))
    settings = {"model": str(path), "load_format": "dummy", "max_model_len": 1024}
    return Target(path, settings, num_medusa_heads=2, longest_prompt=48)


class Results:
    """Lines of a file, one for each method and circumstance of a part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Outcome]:
        """Key -> outcome."""
        if not self._path.exists():
            return {}
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {line["key"]: _outcome(line) for line in lines}

    def add(self, key: str, outcome: Outcome) -> None:
        """One more."""
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, **vars(outcome)}) + "\n")


def _outcome(line: dict[str, Any]) -> Outcome:
    counters = {name: Counter(line[name]) for name in ("different", "drafted", "accepted")}
    return Outcome(num_answers=line["num_answers"], wrong=line["wrong"], seconds=line["seconds"], **counters)


def run_part(part: Part, directory: Path, seed: int) -> None:
    """What is not done yet, in this process, whose tier is the part's."""
    results = Results(directory / "results.jsonl")
    done = results.read()
    wanted = [(method, one) for method in part.methods for one in part.circumstances]
    if all(part.key(*one) in done for one in wanted):
        return
    models = directory / part.model
    bench = Bench(make_target(part.model, models), part.count, models, part.form, seed)
    for method in part.methods:
        outcomes = []
        for circumstance in part.circumstances:
            key = part.key(method, circumstance)
            if key not in done:
                outcome = bench.run(method, circumstance)
                if circumstance == part.circumstances[-1] and circumstance != KILLED:
                    outcome.wrong += unproven([*outcomes, outcome], bench.requests)
                results.add(key, outcome)
                print(f"{key}: {outcome}", *outcome.wrong, sep="\n  ", flush=True)
                done[key] = outcome
            outcomes.append(done[key])


def main() -> int:
    """Exit code 0 when no answer differs and everything happened that should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", nargs="*", help="default: all of this machine, and the emulated one")
    parser.add_argument("--directory", type=Path, default=ROOT / "build/speculation", help="results and models")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args()
    from quire.kernels.native.library import EMULATED_TIER, supported_tiers

    parts = list(plan(args.tiers or [*supported_tiers(), EMULATED_TIER], args.count))
    if args.part is not None:
        run_part(parts[args.part], args.directory, args.seed)
        return 0
    failed = 0
    command = [sys.executable, "-m", "tests.robustness.speculation", *sys.argv[1:], "--part"]
    for number, part in enumerate(parts):
        environment = {**os.environ, "QUIRE_KERNEL_TIER": part.tier, "QUIRE_LOG_LEVEL": "WARNING"}
        failed += subprocess.run([*command, str(number)], cwd=ROOT, env=environment, check=False).returncode != 0
    return report(parts, Results(args.directory / "results.jsonl").read(), failed)


def report(parts: Sequence[Part], done: dict[str, Outcome], num_failed: int) -> int:
    """Print what came of all parts; 1 = not all is well."""
    different = total = num_wrong = 0
    for part in parts:
        keys = [part.key(method, one) for method in part.methods for one in part.circumstances]
        found = [done[key] for key in keys if key in done]
        whole = Outcome(sum(one.num_answers for one in found), seconds=sum(one.seconds for one in found))
        for one in found:
            for name in ("different", "drafted", "accepted"):
                getattr(whole, name).update(getattr(one, name))
        print(f"{part.name}: {whole}")
        for key in keys:
            for what in done[key].wrong if key in done else ["was not run"]:
                num_wrong += 1
                print(f"  wrong: {key}: {what}")
            if key in done and done[key].different.total():
                print(f"  differ: {key}: {dict(+done[key].different)}")
        different, total = different + whole.different.total(), total + whole.num_answers
    if num_failed:
        print(f"{num_failed} processes failed")
    print(f"speculation: {different} of {total} answers differ")
    return int(different + num_wrong + num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
