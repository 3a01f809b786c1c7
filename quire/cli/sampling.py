"""Sampling flags and the start of an engine, for the commands that generate text. No state."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from quire import envs
from quire.config import QuireConfig
from quire.core.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.args import add_engine_arguments, config_from_args
from quire.logger import configure_logging

FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "Maximum number of output tokens."),
    "min_tokens": (int, "Minimum number of output tokens."),
    "temperature": (float, "0 is greedy; higher is more varied."),
    "top_p": (float, "Nucleus sampling: keep the smallest set of tokens with at least this total probability."),
    "top_k": (int, "Keep the k likeliest tokens; 0 = all."),
    "min_p": (float, "Drop tokens below this share of the likeliest one's probability."),
    "presence_penalty": (float, "Subtracted once from the logits of tokens already in the output."),
    "frequency_penalty": (float, "Subtracted from the logits of a token for each occurrence in the output."),
    "repetition_penalty": (
        float,
        "Divides the logits of tokens already in the prompt or output (negative ones are multiplied).",
    ),
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling parameter that is useful on a command line."""
    group = parser.add_argument_group("sampling", "Defaults are the model's own. --seed makes a run repeatable.")
    for name, (kind, doc) in FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, type=kind, dest=name, default=argparse.SUPPRESS, help=doc, metavar=kind.__name__.upper()
        )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="Stop string; repeatable.",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="Continue past the end-of-sequence token."
    )


def sampling_from_args(args: argparse.Namespace, engine: LLMEngine, **fallback: Any) -> SamplingParams:
    """The parameters that the flags, over the model's own, over `fallback`, make."""
    given = {name: getattr(args, name) for name in (*FLAGS, "stop", "ignore_eos") if name in args}
    return SamplingParams(**{**fallback, **engine.defaults.sampling, **given})


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every engine setting."""
    add_engine_arguments(parser)


def start_engine(args: argparse.Namespace, **defaults: Any) -> LLMEngine:
    """The engine that the flags describe; only warnings are logged unless QUIRE_LOG_LEVEL says otherwise."""
    configure_logging(envs.log_level("WARNING"))
    config = config_from_args(args, **defaults)
    configure_logging(config.observability.log_level or envs.log_level("WARNING"), config.observability.log_format)
    return LLMEngine.from_config(config)


def describe_run(config: QuireConfig) -> dict[str, Any]:
    """What a benchmark's figures depend on."""
    return {
        "model": config.model.served_model_name or config.model.model,
        "device": config.device.device,
        "threads": config.device.num_threads,
        "dtype": config.model.dtype,
        **{
            name: value
            for name, value in dataclasses.asdict(config.scheduler).items()
            if name in ("max_num_seqs", "max_num_batched_tokens")
        },
    }
