"""An OpenAI-compatible HTTP server.

SIGTERM lets running answers finish (--shutdown-timeout) while new work gets 503; a second one ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.cli.common import print_resolved
from quire.cli.serve_models import add_models_argument, make_models_server, read_models
from quire.config import QuireConfig
from quire.config.build import (
    SECTIONS,
    SERVER_SECTIONS,
    build_config,
    build_server_config,
    settings_as_dict,
    settings_by_name,
)
from quire.config.resolve import UsageContext
from quire.config.server import ServerConfig
from quire.entrypoints.args import add_engine_arguments, describe_settings, flag_of, values_from_args
from quire.errors import ConfigError
from quire.logger import configure_logging, get_logger
from quire.utils.checks import shown
from quire.utils.heap import map_large_blocks
from quire.utils.phases import Phases, PhaseTimer

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.server.launcher import DrainingServer
    from quire.server.switching.pool import ModelPool

logger = get_logger(__name__)

DEFAULTS = {"disable_log_stats": False}
SWITCH_INTERVAL_S = 0.0005
"""A thread that decodes or detokenizes what is long gives the interpreter's lock to the event loop after so long; by
default it is 5 ms, at each of the loop's wake-ups."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    add_models_argument(parser)
    add_engine_arguments(parser, also=SERVER_SECTIONS)


def settings_from_args(args: argparse.Namespace, **defaults: Any) -> tuple[dict[str, Any], ServerConfig]:
    """What the flags, over the config file, over `defaults`, give for the engine, by name, and make of the server.

    Raises:
        ConfigError, UnsupportedError: the setting is named.
    """
    given = values_from_args(args, {**SERVER_SECTIONS, **SECTIONS})
    if given.get("uds") is not None:
        defaults.pop("port", None)
    values = {**defaults, **given}
    server_names = settings_by_name(SERVER_SECTIONS)
    server: dict[str, Any] = {name: value for name, value in values.items() if name in server_names}
    engine: dict[str, Any] = {name: value for name, value in values.items() if name not in server_names}
    if args.models is None or args.model_argument is not None:
        engine.update(chosen_model(args, engine.get("model")))
    if server.get("api_key_file") is not None:  # where there is one tenant, fcfs is the same order and cheaper
        engine.setdefault("scheduling_policy", "fair")
    return {**DEFAULTS, **engine}, build_server_config(**server)


def configs_from_args(args: argparse.Namespace) -> tuple[QuireConfig, ServerConfig]:
    """What the flags, over the config file, make of engine and server.

    Raises:
        ConfigError, UnsupportedError: the setting is named.
    """
    engine, server = settings_from_args(args)
    return build_config(**engine), server


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
    engine, server = settings_from_args(args)
    keys = (*server.api.api_key, *envs.api_keys())
    server = dataclasses.replace(server, api=dataclasses.replace(server.api, api_key=keys))
    if args.models is None:
        return print_resolved(build_config(**engine), UsageContext.API_SERVER, server)
    for model in read_models(args.models, engine).models:
        print(f"# {model.name}")
        print_resolved(model.config, UsageContext.API_SERVER)
        print()
    print(describe_settings(server, SERVER_SECTIONS))
    return 0


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it, or the engine has stopped for good; returns the exit status."""
    configure_logging()
    engine, server = settings_from_args(args)
    if server.headless.headless:
        return _run_headless(args, build_config(**engine), server)
    if server.http.api_server_count > 1:
        return _run_front_ends(args, PhaseTimer("python and imports"))
    return serve_until_signal(start_from_args(args, PhaseTimer("python and imports")))


def _run_headless(args: argparse.Namespace, config: QuireConfig, server: ServerConfig) -> int:
    """Serve a front end of vLLM's until it ends or a signal comes; returns the exit status."""
    if args.models is not None:
        raise ConfigError("headless serves one model", hint="leave out --models", field="models")
    configure_logging(config.observability.log_level, config.observability.log_format)
    of_http = {name: one for name, one in SERVER_SECTIONS.items() if name != "headless"}
    values, defaults = settings_as_dict(server, of_http), settings_as_dict(ServerConfig(), of_http)
    for name in values:
        if values[name] != defaults[name]:
            logger.warning("%s has no effect with headless, which has no HTTP server: leave it out", name)
    from quire.hosts.engine_core.serve import serve  # late, as the rest of the framework

    envs.prefer_sleeping_threads()
    return serve(config, server.headless.front_end)


def _run_front_ends(args: argparse.Namespace, timer: PhaseTimer) -> int:
    """Serve with several front-end processes, of which this one is the owner; returns the exit status."""
    with timer.phase("settings"):
        engine, server = settings_from_args(args)
        if args.models is not None:
            raise ConfigError(
                "api_server_count needs one model: the models of --models are switched by one process",
                hint="leave out --api-server-count, or --models", field="api_server_count",
            )  # fmt: skip
        config = build_config(**engine)
        configure_logging(config.observability.log_level, config.observability.log_format)
    with timer.phase("checks"):
        from quire.server.checks import check_files, check_together
        from quire.server.http.listening import claim_address

        check_files(server, config.scheduler.scheduling_policy)
        check_together(config, server)
        sockets = claim_address(server.http)
    from quire.server.front_ends.run import serve_front_ends  # late, as the rest of the framework

    return serve_front_ends(config, server, sockets, timer)


def serve_until_signal(started: StartedServer) -> int:
    """Serve in the main thread; returns the exit status."""
    try:
        started.run(lambda address: logger.info("listening on %s; %s", address, started.timer))
        return 1 if started.engine.errored else 0
    finally:
        started.engine.shutdown()


@dataclasses.dataclass(frozen=True, slots=True)
class StartedServer:
    """A server whose engine is ready, not listening yet; `engine.shutdown()` follows.

    Attributes:
        engine: or the engines of several models.
        timer: of the start, for the log and /metrics.
    """

    engine: AsyncLLM | ModelPool
    server: DrainingServer
    config: ServerConfig
    sockets: list[socket.socket] | None
    timer: PhaseTimer

    def run(self, on_listening: Callable[[str], None]) -> None:
        """Listen, call `on_listening` with the address, and serve until a signal or `begin_drain` ends it."""
        import uvloop  # late, as the rest of the framework

        core_start: Phases = getattr(self.engine, "core_start", ())

        def report(address: str) -> None:
            self.timer.end_phase("listening")
            self.server.show_start(self.timer.phases, core_start)
            on_listening(address)

        self.server.on_started = report
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        map_large_blocks()
        gc.freeze()  # what the process has by now it keeps: to look through it would stop every stream
        uvloop.run(self.server.serve(self.sockets))


def start_from_args(args: argparse.Namespace, timer: PhaseTimer, **defaults: Any) -> StartedServer:
    """The server that the flags, over the config file, over `defaults`, describe, with its engine or engines ready.

    Raises:
        QuireError: the settings, a model or the machine does not allow it; no process is left.
    """
    with timer.phase("settings"):
        engine, server_config = settings_from_args(args, **defaults)
        file = None if args.models is None else read_models(args.models, engine)
        config = build_config(**engine)
        observability = config.observability if file is None else file.models[0].config.observability
        configure_logging(observability.log_level, observability.log_format)
        policy = config.scheduler.scheduling_policy
    # Late: `--help` and a wrong flag need neither the engine nor the framework. What is wrong with files, names or the
    # address is found first; then the core's process starts, and loads torch and the model meanwhile.
    with timer.phase("checks"):
        from quire.server.checks import check_files, check_together
        from quire.server.http.listening import claim_address

        check_files(server_config, policy)
        if file is None:
            check_together(config, server_config)
        sockets = claim_address(server_config.http)
    if file is not None:
        pool, server = make_models_server(file, server_config, policy, timer)
        return StartedServer(pool, server, server_config, sockets, timer)
    return _start_one(config, server_config, sockets, timer)


def _start_one(
    config: QuireConfig, server_config: ServerConfig, sockets: list[socket.socket] | None, timer: PhaseTimer
) -> StartedServer:
    """A server of one model."""
    with timer.phase("start of the engine core"):
        from quire.engine.mp_factory import begin_start

        envs.prefer_sleeping_threads()
        start = begin_start(config, usage=UsageContext.API_SERVER)
    try:
        with timer.phase("web framework"):
            import uvloop  # noqa: F401  (used by `StartedServer.run`; its import is part of this phase)

            from quire.engine.async_llm import AsyncLLM
            from quire.server.launcher import make_server
    except BaseException:
        start.cancel()
        raise
    engine = AsyncLLM.from_start(start, timer)
    try:
        with timer.phase("application"):
            return StartedServer(engine, make_server(engine, server_config), server_config, sockets, timer)
    except BaseException:
        engine.shutdown()
        raise
