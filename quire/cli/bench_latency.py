"""Time one batch from prompt to last token; the last line is one JSON object.

Prompts are random and differ in every iteration, and prefix caching is off unless a flag turns it on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.cli import common
from quire.cli.sampling import add_model_arguments, describe_run, start_engine
from quire.core.beam_search import BeamSearchParams
from quire.core.sampling_params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import ValidationError

DEFAULTS = {"enable_prefix_caching": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("benchmark")
    group.add_argument("--input-len", type=int, default=32, metavar="INT", help="Tokens of each prompt.")
    group.add_argument("--output-len", type=int, default=128, metavar="INT", help="Output tokens of each request.")
    group.add_argument("--batch-size", type=int, default=8, metavar="INT", help="Prompts in the batch.")
    group.add_argument("--num-iters-warmup", type=int, default=2, metavar="INT", help="Warm-up batches.")
    group.add_argument("--num-iters", type=int, default=10, metavar="INT", help="Timed batches.")
    group.add_argument("--use-beam-search", action="store_true", help="Search with --n beams instead of sampling.")
    add_run_arguments(group)
    add_model_arguments(parser)


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of the engine that is measured; returns the exit status."""
    return common.print_config(args, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the result."""
    check_positive(args, "input_len", "output_len", "batch_size", "n", "num_iters")
    with LLM.from_engine(start_engine(args, **DEFAULTS)) as llm:
        config = llm.llm_engine.config
        check_fits(args.input_len, args.output_len, config.model.max_model_len)
        prompts = RandomPrompts(config.arch.vocab_size if config.arch else 1, config.model.seed)

        def time_batch() -> float:
            batch = prompts.make(args.batch_size, args.input_len)
            start = time.perf_counter()
            if args.use_beam_search:
                beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)
                llm.beam_search(batch, beams)
            else:
                llm.generate(batch, sampling_of(args, args.output_len), use_tqdm=False)
            return time.perf_counter() - start

        for _ in range(args.num_iters_warmup):
            time_batch()
        seconds = []
        with profiled(llm):
            for iteration in range(args.num_iters):
                seconds.append(time_batch())
                print(f"iteration {iteration + 1}: {seconds[-1]:.3f} s", flush=True)
        settings = describe_run(config)
    num_tokens = args.batch_size * args.n * args.output_len
    result = {
        "benchmark": "latency",
        **settings,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "batch_size": args.batch_size,
        "n": args.n,
        "num_iters": args.num_iters,
        "latency_s": summarize(seconds),
        "output_tokens_per_s": num_tokens / statistics.median(seconds),
    }
    print_result(result, args.output_json)
    return 0


def add_run_arguments(group: Any) -> None:
    """Add the flags that benchmarks of an engine in this process share."""
    group.add_argument("--n", type=int, default=1, metavar="INT", help="Completions per prompt.")
    group.add_argument("--disable-detokenize", action="store_true", help="Do not turn tokens into text.")
    group.add_argument("--output-json", metavar="FILE", help="Also write the result to a file.")


def sampling_of(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    """What every request samples with, to its last token."""
    return SamplingParams(
        n=args.n, temperature=1.0, ignore_eos=True, max_tokens=max_tokens, detokenize=not args.disable_detokenize
    )


@contextlib.contextmanager
def profiled(llm: LLM) -> Iterator[None]:
    """Record the steps within, where `--profile DIR` is given."""
    if llm.llm_engine.config.observability.profiler is None:
        yield
        return
    llm.start_profile()
    try:
        yield
    finally:
        llm.stop_profile()


class RandomPrompts:
    """Prompts of random token ids, never the same twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def make(self, count: int, length: int) -> list[dict[str, Any]]:
        """`count` prompts of `length` tokens."""
        ids = self._rng.integers(0, self._vocab_size, size=(count, length))
        return [{"prompt_token_ids": row} for row in ids.tolist()]


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Refuse counts below one."""
    for name in names:
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValidationError(
                f"{flag} is {getattr(args, name)}, it must be at least 1", hint=f"use {flag} 1 or more", field=name
            )


def check_fits(input_len: int, output_len: int, max_model_len: int | None) -> None:
    """Refuse lengths that the model would cut short, which would make the figures wrong."""
    if max_model_len is not None and input_len + output_len > max_model_len:
        raise ValidationError(
            f"--input-len {input_len} + --output-len {output_len} = {input_len + output_len} tokens, "
            f"max_model_len is {max_model_len}",
            hint="use shorter prompts or outputs, or raise --max-model-len",
            field="output_len",
        )


def summarize(seconds: list[float]) -> dict[str, float]:
    """Mean, median and tails."""
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99]).tolist()
    return {"mean": statistics.fmean(seconds), "median": p50, "p90": p90, "p99": p99, "min": min(seconds)}


def print_result(result: dict[str, Any], path: str | None) -> None:
    """Print `result` as the last line, and write it to `path` if there is one."""
    text = json.dumps(result)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text, flush=True)
