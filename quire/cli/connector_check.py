"""Try whether a KV connector keeps its contract, on random blocks and without a model; exits with 1 if not."""

from __future__ import annotations

import argparse

from quire.config.kv_transfer import parse_kv_transfer_config
from quire.errors import ConfigError

EXIT_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `quire connector-check`."""
    parser.add_argument("config", metavar="JSON", help="The connector, as in --kv-transfer-config.")


def run(args: argparse.Namespace) -> int:
    """Print a line for each check, and what is wrong; returns the exit status."""
    config = parse_kv_transfer_config(args.config)
    if config is None:
        raise ConfigError("no connector is named", hint='write {"kv_connector": "NAME"}', field="config")
    from quire.kv_transfer.conformance import check_connector, describe  # late: they load torch
    from quire.kv_transfer.registry import connector_class

    problems = check_connector(config)
    print("\n".join(describe(connector_class(config), problems)))
    return EXIT_PROBLEM if problems else 0
