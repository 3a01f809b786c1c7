"""What the parts of the engine are worth, each against an engine without it: docs/benchmarks/claims.md.

Static against continuous batching, memory by paging and by sharing, long prompts in chunks, captured steps, the prefix
cache, and `transformers` generate; on the embedded model and on a Llama shape with random weights that is made here.
The arms of a comparison run in turn in one process; a ratio is of medians. Alone on a machine: `make bench-claims`,
which writes the page with `--write`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks/claims.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_SIZE = 16
MAX_LEN = 2048


@dataclass(frozen=True)
class Claim:
    """A comparison.

    Attributes:
        name: what the engine does.
        unit: of both figures.
        without, with_it: medians.
        is_more_better: the ratio is with / without; else without / with.
    """

    name: str
    model: str
    unit: str
    without: float
    with_it: float
    is_more_better: bool

    @property
    def ratio(self) -> float:
        """How many times better with it; above 1 = better."""
        up, down = (self.with_it, self.without) if self.is_more_better else (self.without, self.with_it)
        return up / down if down else 0.0


@dataclass(frozen=True)
class Sizes:
    """How much is run: `full` for figures, `tiny` to see that the program works."""

    rounds: int
    requests: int
    longest: int
    prefix: int

    @classmethod
    def of(cls, is_tiny: bool) -> Sizes:
        """The sizes of a run."""
        return cls(1, 6, 24, 256) if is_tiny else cls(5, 32, 160, 1500)


def make_llama(path: Path) -> Path:
    """A Llama checkpoint with random weights of a fixed seed, written once by transformers."""
    if not (path / "model.safetensors").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(path)
    return path


class Arms:
    """The engines of one model, made when first asked for.

    Args:
        model: a directory.
    """

    def __init__(self, name: str, model: str, sizes: Sizes, rng: random.Random) -> None:
        self.name, self.model, self.sizes, self.rng = name, model, sizes, rng
        self._engines: dict[str, LLM] = {}

    def engine(self, **settings: Any) -> LLM:
        """An engine with these settings."""
        key = repr(sorted(settings.items()))
        if key not in self._engines:
            common = {
                "max_model_len": MAX_LEN,
                "block_size": BLOCK_SIZE,
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "speculative_config": "off",
            }
            self._engines[key] = LLM(self.model, **{**common, **settings})
        return self._engines[key]

    def close(self) -> None:
        """End all engines."""
        for one in self._engines.values():
            one.shutdown()
        self._engines.clear()

    def prompt(self, length: int) -> dict[str, list[int]]:
        """Random tokens."""
        return {"prompt_token_ids": [self.rng.randrange(300, 1500) for _ in range(length)]}

    def claim(
        self, name: str, unit: str, without: Callable[[], float], with_it: Callable[[], float], *, is_more_better: bool
    ) -> Claim:
        """Measure both in turn, after one round that is not counted."""
        figures: list[tuple[float, float]] = [(without(), with_it()) for _ in range(1 + self.sizes.rounds)][1:]
        medians = [statistics.median(one) for one in zip(*figures, strict=True)]
        return Claim(name, self.name, unit, medians[0], medians[1], is_more_better)


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **options)


def batching(arms: Arms) -> Claim:
    """Answers of different lengths, eight at a time: the next eight when all have ended, or one for one."""
    llm = arms.engine(max_num_seqs=8)
    lengths = [arms.rng.randrange(8, arms.sizes.longest) for _ in range(arms.sizes.requests)]

    def rate(group: int) -> float:
        prompts = [arms.prompt(32) for _ in lengths]
        params = [greedy(length) for length in lengths]
        start = time.perf_counter()
        for first in range(0, len(lengths), group):
            llm.generate(prompts[first : first + group], params[first : first + group], use_tqdm=False)
        return sum(lengths) / (time.perf_counter() - start)

    return arms.claim(
        "continuous batching, against static",
        "tokens/s",
        lambda: rate(8),
        lambda: rate(len(lengths)),
        is_more_better=True,
    )


def peak_tokens(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> float:
    """Most tokens of KV cache that blocks were allocated for, at the end of any step."""
    engine = llm.llm_engine
    llm.reset_prefix_cache()
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"{number}-{time.monotonic_ns()}", prompt, one)
    most = 0.0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.last_stats.kv_cache_usage if engine.last_stats else 0.0)
    return most * NUM_BLOCKS * BLOCK_SIZE


NUM_BLOCKS = 8 * MAX_LEN // BLOCK_SIZE


def paging(arms: Arms) -> Claim:
    """Memory of eight requests: the longest that each may become, reserved, or blocks as they are needed."""
    llm = arms.engine(max_num_seqs=8, num_gpu_blocks_override=NUM_BLOCKS + 1, enable_prefix_caching=False)
    lengths = [arms.rng.randrange(8, arms.sizes.longest) for _ in range(8)]
    return arms.claim(
        "paging, against room for max_model_len", "tokens of KV cache", lambda: 8.0 * MAX_LEN,
        lambda: peak_tokens(llm, [arms.prompt(64) for _ in lengths], [greedy(one) for one in lengths]),
        is_more_better=False,
    )  # fmt: skip


def sharing(arms: Arms) -> Claim:
    """Memory of eight answers to one prompt: as eight requests with prompts of their own, or as n=8."""
    llm = arms.engine(max_num_seqs=8, num_gpu_blocks_override=NUM_BLOCKS + 1, enable_prefix_caching=False)
    shared = arms.engine(max_num_seqs=8, num_gpu_blocks_override=NUM_BLOCKS + 1)
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    return arms.claim(
        "sharing a prompt of 512 tokens, n=8", "tokens of KV cache",
        lambda: peak_tokens(llm, [arms.prompt(512) for _ in range(8)], [greedy(32)] * 8),
        lambda: peak_tokens(shared, [arms.prompt(512)], [SamplingParams(n=8, **drawn)]), is_more_better=False,
    )  # fmt: skip


def gaps_and_first(llm: LLM, arms: Arms) -> tuple[float, float]:
    """Milliseconds, when a long prompt comes: longest gap of four streams, first token of a short prompt behind it."""
    engine, stamp = llm.llm_engine, time.monotonic_ns()
    names = [f"stream-{i}-{stamp}" for i in range(4)]
    for name in names:
        engine.add_request(name, arms.prompt(16), greedy(64))
    for _ in range(8):
        engine.step()
    engine.add_request(f"long-{stamp}", arms.prompt(arms.sizes.prefix), greedy(1))
    engine.add_request(f"short-{stamp}", arms.prompt(16), greedy(1))
    start = last = time.perf_counter()
    gap, first = 0.0, 0.0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        moment = time.perf_counter()
        if any(one.request_id in names for one in outputs):
            gap, last = max(gap, moment - last), moment
        if any(one.request_id == f"short-{stamp}" for one in outputs) and not first:
            first = moment - start
    return gap * 1000, first * 1000


def chunking(arms: Arms) -> Iterator[Claim]:
    """A long prompt beside streams: in one step, or in chunks."""
    common = {"max_num_seqs": 8, "enable_prefix_caching": False, "max_num_batched_tokens": MAX_LEN}
    whole = arms.engine(**common, enable_chunked_prefill=False)
    chunks = arms.engine(**common, long_prefill_token_threshold=128)
    figures = [(gaps_and_first(whole, arms), gaps_and_first(chunks, arms)) for _ in range(1 + arms.sizes.rounds)][1:]
    for number, name in ((0, "longest gap of running streams"), (1, "TTFT of a short prompt behind it")):
        without, with_it = (statistics.median(pair[arm][number] for pair in figures) for arm in (0, 1))
        yield Claim(f"chunked prefill beside a long prompt: {name}", arms.name, "ms", without, with_it, False)


def captured(arms: Arms) -> Claim:
    """One stream: every step kernel by kernel, or captured once and replayed."""

    def rate(llm: LLM) -> float:
        length = 2 * arms.sizes.longest
        start = time.perf_counter()
        llm.generate(arms.prompt(16), greedy(length), use_tqdm=False)
        return length / (time.perf_counter() - start)

    eager, replayed = arms.engine(max_num_seqs=8, enforce_eager=True), arms.engine(max_num_seqs=8)
    return arms.claim(
        "captured steps, one stream", "tokens/s", lambda: rate(eager), lambda: rate(replayed), is_more_better=True
    )


def prefix_cache(arms: Arms) -> Claim:
    """Time to the first token of a prompt whose beginning an earlier request had."""

    def first(llm: LLM, *, is_cached: bool) -> float:
        shared = arms.prompt(arms.sizes.prefix)["prompt_token_ids"]
        llm.generate({"prompt_token_ids": shared}, greedy(1), use_tqdm=False)
        start = time.perf_counter()
        [output] = llm.generate({"prompt_token_ids": [*shared, *range(400, 420)]}, greedy(1), use_tqdm=False)
        assert bool(output.num_cached_tokens) == is_cached
        return (time.perf_counter() - start) * 1000

    cold, warm = arms.engine(max_num_seqs=8, enable_prefix_caching=False), arms.engine(max_num_seqs=8)
    return arms.claim(
        f"prefix cache, TTFT after {arms.sizes.prefix} common tokens", "ms",
        lambda: first(cold, is_cached=False), lambda: first(warm, is_cached=True), is_more_better=False,
    )  # fmt: skip


def against_transformers(arms: Arms) -> Iterator[Claim]:
    """The same checkpoint, prompts of one length, greedy, one request and eight at once."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(arms.model, dtype=torch.bfloat16).eval()
    llm, length = arms.engine(max_num_seqs=8), arms.sizes.longest
    for count in (1, 8):

        def theirs(count: int = count) -> float:
            ids = torch.tensor([arms.prompt(32)["prompt_token_ids"] for _ in range(count)])
            options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
            start = time.perf_counter()
            with torch.inference_mode():
                made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert made.shape == (count, 32 + length)
            return count * length / (time.perf_counter() - start)

        def ours(count: int = count) -> float:
            prompts = [arms.prompt(32) for _ in range(count)]
            start = time.perf_counter()
            llm.generate(prompts, greedy(length), use_tqdm=False)
            return count * length / (time.perf_counter() - start)

        name = f"transformers generate, {count} at once"
        yield arms.claim(name, "tokens/s", theirs, ours, is_more_better=True)


def measure(arms: Arms) -> Iterator[Claim]:
    """Every comparison on one model."""
    yield batching(arms)
    yield paging(arms)
    yield sharing(arms)
    yield from chunking(arms)
    yield captured(arms)
    yield prefix_cache(arms)
    yield from against_transformers(arms)


def machine() -> str:
    """What this runs on, in a line."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, {date.today()}"
    )


def table(claims: list[Claim], where: str) -> str:
    """The figures as Markdown."""
    rows = [
        f"| {one.name} | {one.model} | {one.without:.4g} | {one.with_it:.4g} {one.unit} | {one.ratio:.2f} |"
        for one in claims
    ]
    head = "| with it, against without | model | without | with | times better |\n| --- | --- | --- | --- | --- |"
    return f"{where}; medians.\n\n{head}\n" + "\n".join(rows)


def write_page(page: Path, figures: str) -> None:
    """Put the figures between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}")


def main() -> int:
    """Print the table, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="leaf,llama", help="leaf, llama")
    parser.add_argument("--tiny", action="store_true", help="sizes that show that it works, not figures")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "build/checkpoints", help="where llama is made")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    claims: list[Claim] = []
    for name in args.models.split(","):
        path = ROOT / "quire/assets/leaf" if name == "leaf" else make_llama(args.checkpoints / "claims-llama")
        arms = Arms(name, str(path), Sizes.of(args.tiny), random.Random(0))
        for claim in measure(arms):
            claims.append(claim)
            print(f"{claim.model}: {claim.name}: {claim.ratio:.2f}", file=sys.stderr, flush=True)
        arms.close()
    figures = table(claims, machine())
    print(figures)
    if args.write:
        write_page(PAGE, figures)
    print(json.dumps({f"{one.model}: {one.name}": round(one.ratio, 3) for one in claims}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
