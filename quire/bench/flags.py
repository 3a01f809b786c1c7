"""Flags of `quire bench serve`, and what they must be. No state."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from quire.bench.client_watch import ClientLimits
from quire.bench.datasets import MAX_COUNT, add_dataset_arguments, check_dataset
from quire.bench.summary import METRICS, parse_goodput
from quire.bench.workload import DEFAULT_VOCAB_SIZE, FIRST_TOKEN_ID
from quire.errors import ValidationError, unknown_name
from quire.utils.checks import check_float, check_int, shown

CHAT_ENDPOINT, COMPLETIONS_ENDPOINT = "/v1/chat/completions", "/v1/completions"
BACKENDS = {"openai": COMPLETIONS_ENDPOINT, "vllm": COMPLETIONS_ENDPOINT, "openai-chat": CHAT_ENDPOINT}
LIMITS = ClientLimits()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    _add_target_arguments(parser)
    _add_workload_arguments(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="INT", help="Requests.")
    group.add_argument("--num-warmups", type=int, default=0, metavar="INT", help="Warm-up requests.")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="FLOAT", help="Requests per second.")
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="FLOAT",
        help="Shape of the gamma distribution of the inter-arrival times: 1 is a Poisson process, less is more bursty.",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, metavar="INT", help="Maximum number of concurrent requests; default: no limit."
    )
    group.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="SECONDS", help="Timeout of one request."
    )
    group.add_argument("--num-client-processes", type=int, default=1, metavar="INT", help="Number of client processes.")
    _add_result_arguments(parser)


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "An API key is read from QUIRE_API_KEY or OPENAI_API_KEY.")
    group.add_argument("--base-url", metavar="URL", help="Address; default: http://HOST:PORT.")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST", help="Without --base-url.")
    group.add_argument("--port", type=int, default=8000, metavar="PORT", help="Without --base-url.")
    group.add_argument("--backend", default="openai", metavar="NAME", help=f"Default endpoint: {', '.join(BACKENDS)}.")
    group.add_argument("--endpoint", metavar="PATH", help=f"{COMPLETIONS_ENDPOINT} or {CHAT_ENDPOINT}.")
    group.add_argument("--model", metavar="NAME", help="Default: the first of /v1/models.")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="Repeatable.")
    group.add_argument("--insecure", action="store_true", help="Do not verify the server's certificate.")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Seconds to wait for the server to be ready.",
    )


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add_dataset_arguments(group, input_len=1024, output_len=128)
    group.add_argument(
        "--random-vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, metavar="INT",
        help=f"Random token ids are below it, and at least {FIRST_TOKEN_ID}.",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="Send ignore_eos, an extension of Quire and vLLM.")
    group.add_argument("--temperature", type=float, metavar="FLOAT", help="Default: the server's own.")
    group.add_argument("--extra-body", metavar="JSON", help="JSON object of additional fields for every request.")
    group.add_argument("--seed", type=int, default=0, metavar="INT", help="Of prompts and arrival times.")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="Objectives: ttft, tpot, e2el; e.g. ttft:200 tpot:20.",
    )
    group.add_argument("--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="Metrics to report.")
    group.add_argument("--metric-percentiles", default="99", metavar="NUMBERS", help="Comma separated.")
    group.add_argument("--save-result", action="store_true", help="Also write the JSON result to a file.")
    group.add_argument("--save-detailed", action="store_true", help="Include the figures of every request in the file.")
    group.add_argument("--result-dir", default=".", metavar="DIR", help="For --save-result.")
    group.add_argument("--result-filename", metavar="NAME", help="Default: built from rate, model and time.")
    group.add_argument("--plot", metavar="FILE", help="Write TTFT and ITL over time and by percentile as SVG.")
    group.add_argument("--disable-tqdm", action="store_true", help="No progress line.")
    group.add_argument("--allow-failures", action="store_true", help="Exit with status 0 even if requests failed.")
    group.add_argument(
        "--allow-client-limited",
        action="store_true",
        help="Report a result (marked) even if the load generator was saturated.",
    )
    group.add_argument(
        "--max-client-lag-ms", type=float, default=LIMITS.max_lag_ms, metavar="FLOAT",
        help="Maximum lateness (p99) of the client's event loop and dispatches; above it the load generator "
        "counts as saturated.",
    )  # fmt: skip
    group.add_argument(
        "--max-client-cpu", type=float, default=LIMITS.max_cpu_share, metavar="FLOAT",
        help="Maximum CPU share of a client process.",
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Refuse values out of range, and add what others mean: metrics, percentiles, objectives, fields.

    Raises:
        ValidationError: the flag is named.
    """
    check_dataset(args)
    for name, minimum in {"num_warmups": 0, "num_client_processes": 1, "seed": 0}.items():
        check_int(name, getattr(args, name), minimum, MAX_COUNT)
    check_int("random_vocab_size", args.random_vocab_size, FIRST_TOKEN_ID + 1, MAX_COUNT)
    check_float("burstiness", args.burstiness, above=0)
    check_float("request_timeout", args.request_timeout, above=0)
    check_float("ready_check_timeout_sec", args.ready_check_timeout_sec, 0)
    check_float("max_client_lag_ms", args.max_client_lag_ms, above=0)
    check_float("max_client_cpu", args.max_client_cpu, above=0)
    if args.request_rate != math.inf:
        check_float("request_rate", args.request_rate, above=0)
    if args.max_concurrency is not None:
        check_int("max_concurrency", args.max_concurrency, args.num_client_processes, MAX_COUNT)
    if args.num_client_processes > args.num_prompts:
        raise ValidationError(
            f"{args.num_client_processes} client processes for {args.num_prompts} requests",
            hint="use fewer processes", field="num_client_processes",
        )  # fmt: skip
    if args.backend not in BACKENDS:
        raise unknown_name("backend", args.backend, BACKENDS, ValidationError)
    args.metrics = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    for name in args.metrics:
        if name not in METRICS:
            raise unknown_name("metric", name, METRICS, ValidationError)
    args.percentiles = _percentiles(args.metric_percentiles)
    args.objectives = parse_goodput(args.goodput)
    args.fields = _extra_fields(args)


def _percentiles(text: str) -> list[float]:
    try:
        return [check_float("metric_percentiles", float(part), 0, 100) for part in text.split(",")]
    except ValueError:
        raise ValidationError(
            f"--metric-percentiles {shown(text)} is malformed", hint="numbers from 0 to 100, such as 50,90,99",
            field="metric_percentiles",
        ) from None  # fmt: skip


def _extra_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if args.temperature is not None:
        fields["temperature"] = check_float("temperature", args.temperature, 0)
    if args.ignore_eos:
        fields["ignore_eos"] = True
    try:
        extra = {} if args.extra_body is None else json.loads(args.extra_body)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ValidationError(
            f"--extra-body {shown(args.extra_body)} is not a JSON object", hint="""for example '{"top_k": 1}'""",
            field="extra_body",
        )  # fmt: skip
    return {**fields, **extra}
