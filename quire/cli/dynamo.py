"""A worker of an NVIDIA Dynamo deployment.

Needs ai-dynamo (docs/how-to/hosts.md), and Dynamo's front end, which finds the worker: python -m dynamo.frontend.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
from typing import Any

from quire.cli.common import print_resolved
from quire.cli.serve import chosen_model
from quire.config import QuireConfig
from quire.config.build import DYNAMO_SECTIONS, SECTIONS, build_config, settings_by_name
from quire.config.dynamo import DynamoConfig
from quire.config.resolve import UsageContext
from quire.entrypoints.args import add_engine_arguments, values_from_args
from quire.errors import ConfigError
from quire.logger import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    add_engine_arguments(parser, also=DYNAMO_SECTIONS)


def configs_from_args(args: argparse.Namespace) -> tuple[QuireConfig, DynamoConfig]:
    """What the flags, over the config file, make of the engine and of the worker's place.

    Raises:
        ConfigError, UnsupportedError: the setting is named.
    """
    values = values_from_args(args, {**DYNAMO_SECTIONS, **SECTIONS})
    of_place = settings_by_name(DYNAMO_SECTIONS)
    place = DynamoConfig(**{of_place[name].field: value for name, value in values.items() if name in of_place})
    engine: dict[str, Any] = {name: value for name, value in values.items() if name not in of_place}
    engine.update(chosen_model(args, engine.get("model")))
    if place.enable_kv_routing and "kv_events_config" not in engine and engine.get("enable_prefix_caching", True):
        engine["kv_events_config"] = _kv_events()
    config = build_config(**engine)
    if place.disaggregation_mode != "agg" and config.kv_transfer is None:
        raise ConfigError(
            f"disaggregation_mode={place.disaggregation_mode} needs a KV connector",
            hint="give --kv-transfer-config, the same to prefill and decode workers", field="kv_transfer_config",
        )  # fmt: skip
    return config, place


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of the engine and of the worker's place; returns the exit status."""
    config, place = configs_from_args(args)
    print_resolved(config, UsageContext.API_SERVER)
    print()
    for name, value in dataclasses.asdict(place).items():
        print(f"{name:<21}  {'none' if value is None else value}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Serve as a worker until a signal ends it; returns the exit status."""
    config, place = configs_from_args(args)
    configure_logging(config.observability.log_level, config.observability.log_format)
    try:
        from quire.hosts.dynamo.backend import run as run_worker
    except ImportError as error:
        raise ConfigError(
            f"Dynamo cannot be imported: {error}", hint="install ai-dynamo 1.6 as docs/how-to/hosts.md says"
        ) from None
    run_worker(config, place)
    return 0


def _kv_events() -> str:
    """Events of the prefix cache on a free port of the loopback: the worker in this process reads them."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"})
