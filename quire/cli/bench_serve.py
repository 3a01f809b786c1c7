"""Measure a running OpenAI-compatible server: throughput and latencies under a load of streams.

Sends standard fields only, so servers of any make can be compared. Exits with 1 when requests failed or when this
client, not the server, was the limit; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from quire import envs
from quire.bench import workload
from quire.bench.client_watch import ClientLimits, missing_files
from quire.bench.datasets import read_questions
from quire.bench.flags import BACKENDS, add_arguments, check
from quire.bench.load import Progress
from quire.bench.plot import plot
from quire.bench.processes import run_in_processes
from quire.bench.records import Load, LoadReport, RequestRecord, Target
from quire.bench.report import print_report
from quire.bench.summary import details_of, figures
from quire.bench.target import first_model, make_target
from quire.errors import ConfigError, QuireServerError
from quire.version import __version__

__all__ = ["add_arguments", "run"]

EXIT_FAILED = 1
PROGRESS_S = 1.0


def run(args: argparse.Namespace) -> int:
    """Measure, and print the result."""
    check(args)
    limits = ClientLimits(args.max_client_lag_ms, args.max_client_cpu)
    target = _target(args)
    if args.model is None or args.ready_check_timeout_sec:
        listed = first_model(target, args.ready_check_timeout_sec)
        args.model = args.model or listed
    warmup, load = _loads(args, target)
    _check_files(args, load)
    if warmup.jobs:
        _warm_up(warmup)
    report = run_in_processes(load, args.num_client_processes, None if args.disable_tqdm else _progress(len(load.jobs)))
    if not args.disable_tqdm and sys.stderr.isatty():
        print(file=sys.stderr)
    is_measured = any(record.failure is None for record in report.records)
    reasons = limits.exceeded_by(report.health) if is_measured else []  # the failures are what there is to say
    if reasons and not args.allow_client_limited:
        return _refuse(reasons, report)
    result = _result(args, target, load, report, reasons)
    if args.save_result:
        _save(args, result, report)
    if args.plot is not None:
        title = f"{args.model}: {args.num_prompts} requests, rate {args.request_rate:g}/s"
        _write(args.plot, plot(report.records, report.start_s, title), "plot")
    print_report(result)
    print(json.dumps(result), flush=True)
    return EXIT_FAILED if result["failed"] and not args.allow_failures else 0


def _target(args: argparse.Namespace) -> Target:
    headers = {}
    for text in args.header:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header {text!r} has no value", hint="write --header NAME=VALUE", field="header")
        headers[name] = value
    host = f"[{args.host}]" if ":" in args.host else args.host
    return make_target(
        args.base_url or f"http://{host}:{args.port}", args.endpoint or BACKENDS[args.backend], headers=headers,
        api_key=envs.api_key() or envs.openai_api_key(), checks_certificate=not args.insecure,
    )  # fmt: skip


def _loads(args: argparse.Namespace, target: Target) -> tuple[Load, Load]:
    """The warm-up and the load that is measured; no request is in both."""
    count, is_chat = args.num_prompts + args.num_warmups, target.is_chat
    questions = read_questions(args, count, args.seed, is_chat=is_chat, vocab_size=args.random_vocab_size)
    due_s = workload.arrival_times(args.num_prompts, args.request_rate, args.burstiness, args.seed)

    def load(part: list[workload.Question], due: list[float], *, has_rate: bool) -> Load:
        return Load(
            target=target, jobs=workload.make_jobs(part, due, model=args.model, is_chat=is_chat, fields=args.fields),
            max_concurrency=args.max_concurrency, timeout_s=args.request_timeout, has_rate=has_rate,
        )  # fmt: skip

    warmups = questions[args.num_prompts :]
    return (
        load(warmups, [0.0] * len(warmups), has_rate=False),
        load(questions[: args.num_prompts], due_s, has_rate=args.request_rate != math.inf),
    )


def _check_files(args: argparse.Namespace, load: Load) -> None:
    """Refuse a run for which this process may not open enough connections; children inherit its limit."""
    needed = -(-(load.max_concurrency or len(load.jobs)) // args.num_client_processes)
    missing = missing_files(needed)
    if missing and not args.allow_client_limited:
        raise QuireServerError(
            f"the client may open {missing} files too few for {needed} connections",
            hint="raise the limit (ulimit -Hn), or use --max-concurrency or more --num-client-processes",
        )


def _warm_up(load: Load) -> None:
    failed = [record.failure for record in run_in_processes(load, 1).records if record.failure is not None]
    if failed:
        raise QuireServerError(
            f"{len(failed)} of {len(load.jobs)} warm-up requests failed: {failed[0].kind}: {failed[0].message}",
            hint="nothing was measured",
        )


def _progress(total: int) -> Progress:
    """A line on stderr, at most once a second; without a terminal, only the last."""
    done, failed, shown_s = 0, 0, 0.0
    is_terminal = sys.stderr.isatty()

    def note(record: RequestRecord) -> None:
        nonlocal done, failed, shown_s
        done += 1
        failed += record.failure is not None
        now = time.monotonic()
        if done == total or (is_terminal and now - shown_s >= PROGRESS_S):
            shown_s = now
            start, end = ("\r", "") if is_terminal else ("", "\n")
            print(f"{start}{done}/{total} requests, {failed} failed", end=end, file=sys.stderr, flush=True)

    return note


def _refuse(reasons: list[str], report: LoadReport) -> int:
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    print(
        "hint: no result, because the load generator was saturated; use --num-client-processes, fewer "
        "requests at once or a separate client machine; --allow-client-limited reports a marked result",
        file=sys.stderr,
    )
    print(json.dumps({"benchmark": "serve", "refused": reasons, "client": _client(report)}), flush=True)
    return EXIT_FAILED


def _result(
    args: argparse.Namespace, target: Target, load: Load, report: LoadReport, reasons: list[str]
) -> dict[str, Any]:
    return {
        "benchmark": "serve",
        "date": time.strftime("%Y%m%d-%H%M%S", time.gmtime()),
        "client_version": __version__,
        "base_url": f"{'https' if target.is_tls else 'http'}://{target.host}:{target.port}",
        "endpoint": target.path,
        "model_id": args.model,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if args.request_rate == math.inf else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "extra_fields": args.fields,
        **figures(
            report.records, report.start_s, metrics=args.metrics, percentiles=args.percentiles,
            objectives=args.objectives,
        ),
        "goodput_objectives_ms": args.objectives,
        "client_limited": reasons,
        "client": {"num_processes": args.num_client_processes, **_client(report)},
    }  # fmt: skip


def _client(report: LoadReport) -> dict[str, Any]:
    health = report.health
    return {name: getattr(health, name) for name in health.__struct_fields__}


def _save(args: argparse.Namespace, result: dict[str, Any], report: LoadReport) -> None:
    model = "".join(one if one.isalnum() or one in "._-" else "-" for one in args.model.rpartition("/")[2])
    name = args.result_filename or f"serve-{result['request_rate']}qps-{model}-{result['date']}.json"
    content = {**result, **details_of(report.records, report.start_s)} if args.save_detailed else result
    _write(str(Path(args.result_dir) / name), json.dumps(content) + "\n", "result_dir")


def _write(path: str, text: str, field: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="check the path", field=field) from None
