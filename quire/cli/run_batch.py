"""Answer a file of requests in OpenAI's batch format; the same command goes on where an earlier run ended.

Results are written as they come, in any order, each with its custom_id. Exits with 1 when requests failed or lines
were invalid.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from quire import envs
from quire.batch.endpoints import Endpoint, LocalEndpoint, RemoteEndpoint
from quire.batch.files import RequestFile, ResultFile
from quire.batch.runner import BatchCounts, run_batch
from quire.bench.load import run_on_loop
from quire.bench.target import make_target
from quire.cli.common import print_resolved
from quire.config import QuireConfig
from quire.config.build import SECTIONS, SERVER_SECTIONS, build_config, build_server_config, settings_by_name
from quire.config.resolve import UsageContext
from quire.config.server import ServerConfig
from quire.engine.protocol import EngineClient
from quire.entrypoints.args import add_engine_arguments, values_from_args
from quire.errors import ConfigError
from quire.logger import configure_logging
from quire.utils.checks import check_float, check_int

EXIT_FAILED = 1
REMOTE_CONCURRENCY = 64
MAX_CONCURRENCY = 1 << 20
REQUEST_SECTIONS = {name: SERVER_SECTIONS[name] for name in ("api", "limits")}

Batch = Callable[[Endpoint, int, int | None], Coroutine[Any, Any, BatchCounts]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE", help="Input file of requests (JSON lines).")
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="Output file; results are appended.")
    group.add_argument(
        "--retry-failed", action="store_true", help="Retry requests whose result in the output file is an error."
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="INT",
        help=f"Maximum number of concurrent requests; default: twice max_num_seqs, with --url {REMOTE_CONCURRENCY}.",
    )  # fmt: skip
    group.add_argument(
        "--url",
        metavar="URL",
        help="Send the requests to a running server (key: QUIRE_API_KEY or OPENAI_API_KEY) instead of loading a model.",
    )
    group.add_argument("--request-timeout", type=float, default=3600.0, metavar="SECONDS", help="For --url.")
    add_engine_arguments(parser, also=REQUEST_SECTIONS)


def configs_from_args(args: argparse.Namespace) -> tuple[QuireConfig, ServerConfig]:
    """What the flags, over the config file, make of the engine and of the checks of requests.

    Raises:
        ConfigError, UnsupportedError: the setting is named.
    """
    values = values_from_args(args, {**REQUEST_SECTIONS, **SECTIONS})
    names = settings_by_name(REQUEST_SECTIONS)
    server = build_server_config(**{name: value for name, value in values.items() if name in names})
    for name in ("api_key", "api_key_file"):
        if getattr(server.api, name):
            raise ConfigError(
                f"{name} has no effect in offline mode", hint="leave it out; for --url set QUIRE_API_KEY",
                field=name,
            )  # fmt: skip
    config = build_config(**{name: value for name, value in values.items() if name not in names})
    return config, dataclasses.replace(server, http=dataclasses.replace(server.http, disable_access_log=True))


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of the engine and of requests; returns the exit status."""
    config, server = configs_from_args(args)
    return print_resolved(config, UsageContext.API_SERVER, server, REQUEST_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Answer every request that has no result yet."""
    if args.max_concurrency is not None:
        check_int("max_concurrency", args.max_concurrency, 1, MAX_CONCURRENCY)
    check_float("request_timeout", args.request_timeout, above=0)
    configs = configs_from_args(args)
    requests = RequestFile(args.input_file)
    with ResultFile(args.output_file, retries_failed=args.retry_failed) as results:
        _check_same_batch(requests, results, args)

        async def batch(endpoint: Endpoint, max_concurrency: int, seed: int | None) -> BatchCounts:
            return await run_batch(
                requests, results, endpoint, max_concurrency=args.max_concurrency or max_concurrency, seed=seed,
                on_progress=lambda counts: print(counts, file=sys.stderr, flush=True),
                is_strict=configs[1].api.strict_requests,
            )  # fmt: skip

        counts = _run_remote(args, batch) if args.url is not None else _run_local(*configs, batch)
        num_failed = counts.num_failed + counts.num_bad + results.finished.num_failed
    print(counts)
    if num_failed:
        print(f"{num_failed} lines failed; --retry-failed retries them", file=sys.stderr)
    return EXIT_FAILED if num_failed else 0


def _check_same_batch(requests: RequestFile, results: ResultFile, args: argparse.Namespace) -> None:
    foreign = results.finished.custom_ids - requests.custom_ids
    if foreign:
        raise ConfigError(
            f"{args.output_file} has a result of {min(foreign)!r}, which is not in {args.input_file}",
            hint="choose another --output-file", field="output_file",
        )  # fmt: skip


def _run_remote(args: argparse.Namespace, batch: Batch) -> BatchCounts:
    target = make_target(
        args.url, "/v1/completions", headers={}, api_key=envs.api_key() or envs.openai_api_key(), flag="--url"
    )
    prefix = urlsplit(args.url).path.rstrip("/").removesuffix("/v1")

    async def ask() -> BatchCounts:
        endpoint = RemoteEndpoint(target, prefix, args.request_timeout)
        try:
            return await batch(endpoint, REMOTE_CONCURRENCY, None)
        finally:
            endpoint.close()

    return run_on_loop(ask())


def _run_local(config: QuireConfig, server_config: ServerConfig, batch: Batch) -> BatchCounts:
    engine = start_engine(config)
    try:
        return run_on_loop(ask_engine(engine, server_config, batch))
    finally:
        engine.shutdown()


def start_engine(config: QuireConfig) -> Any:
    """The engine of a batch."""
    # Late: `--help`, a wrong flag and --url need no engine.
    from quire.engine.async_llm import AsyncLLM

    observability = config.observability
    configure_logging(observability.log_level or envs.log_level("WARNING"), observability.log_format)
    envs.prefer_sleeping_threads()
    return AsyncLLM.from_config(config)


async def ask_engine(engine: EngineClient, config: ServerConfig, batch: Batch) -> BatchCounts:
    """Run `batch` on the server's application around `engine`."""
    # Late, as above.
    from quire.server.app import make_app

    app = make_app(engine, config)
    key = envs.api_key()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with app.router.lifespan_context(app):
        width = 2 * (engine.config.scheduler.max_num_seqs or REMOTE_CONCURRENCY)
        return await batch(LocalEndpoint(app, headers), width, engine.config.model.seed)
