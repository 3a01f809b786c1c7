"""Which prompts a benchmark asks: flags that `quire bench serve` and `quire bench throughput` share. No state."""

from __future__ import annotations

import argparse
from typing import Any

from quire.bench.workload import (
    DEFAULT_VOCAB_SIZE,
    FIRST_TOKEN_ID,
    Question,
    RandomLengths,
    RepeatedPrefixes,
    file_questions,
    random_questions,
    repeated_prefix_questions,
)
from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.utils.checks import check_float, check_int

MAX_COUNT = 10**7
FILES = ("custom", "sharegpt")
DATASETS = ("random", "prefix_repetition", *FILES)
_CONVERT = "write its prompts as JSON lines and use --dataset-name custom --dataset-path FILE"
_MEDIA = "Quire does not support image, audio or video inputs, and does not have pooling models"
ELSEWHERE = {
    "hf": _CONVERT, "sonnet": _CONVERT, "burstgpt": _CONVERT, "blazedit": _CONVERT, "spec_bench": _CONVERT,
    "custom_mm": _MEDIA, "custom_image": _MEDIA, "random-mm": _MEDIA, "random-rerank": _MEDIA,
}  # fmt: skip
"""Datasets of vLLM's benchmarks -> what to do here."""


def add_dataset_arguments(group: Any, input_len: int, output_len: int) -> None:
    """Add them.

    Args:
        group: of a parser.
        input_len, output_len: defaults.
    """
    group.add_argument(
        "--dataset-name", default="random", metavar="NAME",
        help="random; prefix_repetition; custom (JSON lines with prompt or messages, output_tokens); sharegpt.",
    )  # fmt: skip
    group.add_argument("--dataset-path", metavar="FILE", help="For custom and sharegpt.")
    group.add_argument(
        "--random-input-len", "--input-len", type=int, default=input_len, metavar="INT",
        help="Tokens of each random prompt; for a chat, words.",
    )  # fmt: skip
    group.add_argument(
        "--random-output-len", "--output-len", type=int, default=output_len, metavar="INT",
        help="Maximum output tokens of each request.",
    )  # fmt: skip
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="FLOAT",
        help="Random lengths vary uniformly by this fraction.",
    )  # fmt: skip
    group.add_argument(
        "--random-prefix-len", "--prefix-len", type=int, default=0, metavar="INT",
        help="Tokens of a prefix shared by all prompts.",
    )  # fmt: skip
    for name, default, what in (
        ("prefix-len", 256, "Tokens of each repeated prefix."),
        ("suffix-len", 256, "Tokens of each prompt after its prefix."),
        ("num-prefixes", 10, "Repeated prefixes, each of equally many requests."),
        ("output-len", 128, "Maximum output tokens of each request with a repeated prefix."),
    ):
        group.add_argument(f"--prefix-repetition-{name}", type=int, default=default, metavar="INT", help=what)


def check_dataset(args: argparse.Namespace) -> None:
    """Refuse values out of range, and combinations that mean nothing.

    Raises:
        ValidationError: the flag is named.
        UnsupportedError: the dataset is one of vLLM's that is not read here.
    """
    for name, minimum in {
        "num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0,
        "prefix_repetition_prefix_len": 1, "prefix_repetition_suffix_len": 1, "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_output_len": 1,
    }.items():  # fmt: skip
        check_int(name, getattr(args, name), minimum, MAX_COUNT)
    check_float("random_range_ratio", args.random_range_ratio, 0, 0.999)
    name = args.dataset_name
    if name in ELSEWHERE:
        raise UnsupportedError(f"--dataset-name {name} is not supported", hint=ELSEWHERE[name], field="dataset_name")
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS, ValidationError)
    if (name in FILES) != (args.dataset_path is not None):
        raise ValidationError(
            "--dataset-path goes with --dataset-name custom or sharegpt", hint="give both or neither",
            field="dataset_path",
        )  # fmt: skip


def read_questions(
    args: argparse.Namespace, count: int, seed: int, *, is_chat: bool, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[Question]:
    """The first `count` requests of the dataset that the flags name.

    Args:
        vocab_size: random token ids are below it, and at least `FIRST_TOKEN_ID`.

    Raises:
        ConfigError, ValidationError: as `file_questions`.
    """
    if args.dataset_name in FILES:
        return file_questions(
            args.dataset_name, args.dataset_path, count, args.random_output_len, seed, is_chat=is_chat
        )
    vocab_size = max(vocab_size, FIRST_TOKEN_ID + 1)
    if args.dataset_name == "prefix_repetition":
        prefixes = RepeatedPrefixes(
            prefix_len=args.prefix_repetition_prefix_len, suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes, output_len=args.prefix_repetition_output_len,
            vocab_size=vocab_size,
        )  # fmt: skip
        return repeated_prefix_questions(count, prefixes, seed, is_chat=is_chat)
    lengths = RandomLengths(
        input_len=args.random_input_len, output_len=args.random_output_len, range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len, vocab_size=vocab_size,
    )  # fmt: skip
    return random_questions(count, lengths, seed, is_chat=is_chat)
