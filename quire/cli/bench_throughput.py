"""Tokens per second over many requests submitted together; the last line is one JSON object.

Prompts are random, and prefix caching is off unless a flag turns it on.
"""

from __future__ import annotations

import argparse
import time

from quire.cli import common
from quire.cli.bench_latency import (
    DEFAULTS,
    RandomPrompts,
    check_fits,
    check_positive,
    print_result,
    summarize,
)
from quire.cli.sampling import add_model_arguments, describe_run, start_engine
from quire.core.sampling_params import SamplingParams
from quire.entrypoints.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=int, default=100, metavar="INT", help="Requests.")
    group.add_argument("--input-len", type=int, default=64, metavar="INT", help="Tokens of each prompt.")
    group.add_argument("--output-len", type=int, default=64, metavar="INT", help="Output tokens of each request.")
    group.add_argument("--num-warmup", type=int, default=4, metavar="INT", help="Warm-up requests.")
    group.add_argument("--output-json", metavar="FILE", help="Also write the result to a file.")
    add_model_arguments(parser)


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of the engine that is measured; returns the exit status."""
    return common.print_config(args, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the result."""
    check_positive(args, "num_prompts", "input_len", "output_len")
    with LLM.from_engine(start_engine(args, **DEFAULTS)) as llm:
        config = llm.llm_engine.config
        check_fits(args.input_len, args.output_len, config.model.max_model_len)
        prompts = RandomPrompts(config.arch.vocab_size if config.arch else 1, config.model.seed)
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
        llm.generate(prompts.make(args.num_warmup, args.input_len), params, use_tqdm=False)
        batch = prompts.make(args.num_prompts, args.input_len)
        start = time.perf_counter()
        outputs = llm.generate(batch, params)
        seconds = time.perf_counter() - start
        settings = describe_run(config)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    result = {
        "benchmark": "throughput",
        **settings,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "elapsed_s": seconds,
        "requests_per_s": args.num_prompts / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_output_tokens + num_prompt_tokens) / seconds,
        "ttft_s": summarize([output.metrics.first_token_latency for output in outputs]),
        "num_preemptions": sum(output.metrics.num_preemptions for output in outputs),
    }
    print_result(result, args.output_json)
    return 0
