"""An OpenAI-compatible HTTP server.

SIGTERM lets running answers finish (--shutdown-timeout) while new work gets 503; a second one ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from typing import Any

from quire import envs
from quire.cli.common import print_resolved
from quire.config import QuireConfig
from quire.config.build import SECTIONS, SERVER_SECTIONS, build_config, build_server_config, settings_by_name
from quire.config.resolve import UsageContext
from quire.config.server import ServerConfig
from quire.entrypoints.args import add_engine_arguments, flag_of, values_from_args
from quire.errors import ConfigError
from quire.logger import configure_logging, get_logger
from quire.utils.checks import shown
from quire.utils.heap import map_large_blocks
from quire.utils.phases import PhaseTimer

logger = get_logger(__name__)

DEFAULTS = {"disable_log_stats": False}
SWITCH_INTERVAL_S = 0.0005
"""A thread that decodes or detokenizes what is long gives the interpreter's lock to the event loop after so long; by
default it is 5 ms, at each of the loop's wake-ups."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    add_engine_arguments(parser, also=SERVER_SECTIONS)


def configs_from_args(args: argparse.Namespace) -> tuple[QuireConfig, ServerConfig]:
    """What the flags, over the config file, make of engine and server.

    Raises:
        ConfigError, UnsupportedError: the setting is named.
    """
    values = values_from_args(args, {**SERVER_SECTIONS, **SECTIONS})
    server_names = settings_by_name(SERVER_SECTIONS)
    server: dict[str, Any] = {name: value for name, value in values.items() if name in server_names}
    engine: dict[str, Any] = {name: value for name, value in values.items() if name not in server_names}
    engine.update(chosen_model(args, engine.get("model")))
    if server.get("api_key_file") is not None:  # where there is one tenant, fcfs is the same order and cheaper
        engine.setdefault("scheduling_policy", "fair")
    return build_config(**{**DEFAULTS, **engine}), build_server_config(**server)


def chosen_model(args: argparse.Namespace, named: Any) -> dict[str, Any]:
    """{"model": the positional one}, if there is one.

    Raises:
        ConfigError: `named`, the setting, is another; or a flag with several values may have taken the positional one.
    """
    given = args.model_argument
    if given is not None and named is not None and given != named:
        raise ConfigError(
            f"two models: {shown(given)} and --model {shown(named)}", hint="give one of the two", field="model"
        )
    lists = {name: value for name, value in vars(args).items() if isinstance(value, list) and len(value) > 1}
    if given is None and named is None and lists:
        name, taken = next(iter(lists.items()))
        raise ConfigError(
            f"no model given: {flag_of(name)} took {', '.join(map(shown, taken))} as values",
            hint=f"put the model first: quire serve MODEL {flag_of(name)} ...",
            field="model",
        )
    return {} if given is None else {"model": given}


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of engine and server; returns the exit status."""
    config, server = configs_from_args(args)
    keys = (*server.api.api_key, *envs.api_keys())
    server = dataclasses.replace(server, api=dataclasses.replace(server.api, api_key=keys))
    return print_resolved(config, UsageContext.API_SERVER, server)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it, or the engine has stopped for good; returns the exit status."""
    configure_logging()
    timer = PhaseTimer("python and imports")
    with timer.phase("settings"):
        config, server_config = configs_from_args(args)
        configure_logging(config.observability.log_level, config.observability.log_format)
    # Late: `--help` and a wrong flag need neither the engine nor the framework. What is wrong with files, names or the
    # address is found first; then the core's process starts, and loads torch and the model meanwhile.
    with timer.phase("checks"):
        from quire.server.checks import check_files
        from quire.server.http.listening import claim_address

        check_files(server_config, config.scheduler.scheduling_policy)
        sockets = claim_address(server_config.http)
    with timer.phase("start of the engine core"):
        from quire.engine.mp_factory import begin_start

        envs.prefer_sleeping_threads()
        start = begin_start(config, usage=UsageContext.API_SERVER)
    try:
        with timer.phase("web framework"):
            import uvloop

            from quire.engine.async_llm import AsyncLLM
            from quire.server.launcher import make_server
    except BaseException:
        start.cancel()
        raise
    engine = AsyncLLM.from_start(start, timer)
    try:
        with timer.phase("application"):
            server = make_server(engine, server_config)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        map_large_blocks()
        gc.freeze()  # what the process has by now it keeps: to look through it would stop every stream

        def report(address: str) -> None:
            timer.end_phase("listening")
            server.show_start(timer.phases, engine.core_start)
            logger.info("listening on %s; %s", address, timer)

        server.on_started = report
        uvloop.run(server.serve(sockets))
        return 1 if engine.errored else 0
    finally:
        engine.shutdown()
