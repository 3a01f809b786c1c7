"""Tokens per second over many requests submitted together; the last line is one JSON object.

Prompts are random or of a file (`--dataset-name`, as in `quire bench serve`), and prefix caching is off unless a flag
turns it on. Every request goes on to its last token: end-of-sequence tokens do not end it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from quire.bench.datasets import FILES, MAX_COUNT, add_dataset_arguments, check_dataset, read_questions
from quire.bench.workload import Question
from quire.cli import common
from quire.cli.bench_latency import (
    DEFAULTS,
    add_run_arguments,
    check_fits,
    check_positive,
    print_result,
    profiled,
    sampling_of,
    summarize,
)
from quire.cli.sampling import add_model_arguments, describe_run, start_engine
from quire.core.outputs import RequestOutput
from quire.entrypoints.llm import LLM
from quire.errors import ValidationError, unknown_name
from quire.utils.checks import check_int

BACKENDS = ("vllm", "vllm-chat")
_OWN = "leave it out: this command measures Quire's own engine"
OTHER_BACKENDS = {"hf": _OWN, "mii": _OWN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("benchmark", conflict_handler="resolve")
    group.add_argument("--num-prompts", type=int, default=100, metavar="INT", help="Requests.")
    group.add_argument("--num-warmup", "--num-warmups", type=int, default=4, metavar="INT", help="Warm-up requests.")
    add_run_arguments(group)
    add_dataset_arguments(parser.add_argument_group("workload"), input_len=64, output_len=64)
    add_model_arguments(parser)
    # Last: it is the other name of an engine setting, too, which is left with its own one here.
    group.add_argument(
        "--backend", default="vllm", metavar="NAME",
        help="vllm (prompts) or vllm-chat (conversations, by the chat template); both measure Quire.",
    )  # fmt: skip


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of the engine that is measured; returns the exit status."""
    return common.print_config(args, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the result."""
    check_positive(args, "num_prompts", "random_input_len", "random_output_len", "n")
    check_int("num_warmup", args.num_warmup, 0, MAX_COUNT)
    check_dataset(args)
    if args.backend not in BACKENDS:
        raise unknown_name("backend", args.backend, BACKENDS, ValidationError, elsewhere=OTHER_BACKENDS)
    is_chat = args.backend == "vllm-chat"
    with LLM.from_engine(start_engine(args, **DEFAULTS)) as llm:
        config = llm.llm_engine.config
        if args.dataset_name not in FILES and not is_chat:
            check_fits(*_longest(args), config.model.max_model_len)
        vocab_size = config.arch.vocab_size if config.arch else 1
        count = args.num_prompts + args.num_warmup
        questions = read_questions(args, count, config.model.seed, is_chat=is_chat, vocab_size=vocab_size)
        _answer(llm, questions[args.num_prompts :], args, is_timed=False)
        with profiled(llm):
            start = time.perf_counter()
            outputs = _answer(llm, questions[: args.num_prompts], args, is_timed=True)
            seconds = time.perf_counter() - start
        settings = describe_run(config)
    num_output_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    is_random = args.dataset_name == "random"
    result = {
        "benchmark": "throughput",
        **settings,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "input_len": args.random_input_len if is_random else None,
        "output_len": args.random_output_len if is_random else None,
        "n": args.n,
        "elapsed_s": seconds,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "requests_per_s": args.num_prompts / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_output_tokens + num_prompt_tokens) / seconds,
        "ttft_s": summarize([output.metrics.first_token_latency for output in outputs]),
        "num_preemptions": sum(output.metrics.num_preemptions for output in outputs),
    }
    print_result(result, args.output_json)
    return 0


def _longest(args: argparse.Namespace) -> tuple[int, int]:
    """Most tokens of a prompt and of an output."""
    if args.dataset_name == "prefix_repetition":
        prompt = args.prefix_repetition_prefix_len + args.prefix_repetition_suffix_len
        return prompt, args.prefix_repetition_output_len
    most = 1 + args.random_range_ratio
    return args.random_prefix_len + int(args.random_input_len * most), int(args.random_output_len * most)


def _answer(
    llm: LLM, questions: Sequence[Question], args: argparse.Namespace, *, is_timed: bool
) -> list[RequestOutput]:
    """Everything at once; with a progress bar where it is timed."""
    params = [sampling_of(args, one.max_tokens) for one in questions]
    if not questions:
        return []
    if args.backend == "vllm-chat":
        return llm.chat([one.messages or [] for one in questions], params, use_tqdm=is_timed)
    prompts = [one.prompt if isinstance(one.prompt, str) else {"prompt_token_ids": one.prompt} for one in questions]
    return llm.generate(prompts, params, use_tqdm=is_timed)
