"""What subcommands share. Called by `cli.main` and the subcommands; no state."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.config import QuireConfig
from quire.config.build import SERVER_SECTIONS
from quire.config.resolve import UsageContext
from quire.config.server import ServerConfig
from quire.entrypoints.args import config_from_args, describe_config, describe_settings


def print_config(args: argparse.Namespace, **defaults: Any) -> int:
    """Show every setting, what each auto became on this machine for this model, and why; returns the exit status.

    Args:
        defaults: settings that the command has, as it gives them to `start_engine`.
    """
    return print_resolved(config_from_args(args, **defaults), UsageContext.LLM_CLASS)


def print_resolved(
    config: QuireConfig,
    usage: UsageContext,
    server: ServerConfig | None = None,
    sections: Mapping[str, type] = SERVER_SECTIONS,
) -> int:
    """As `print_config`, of a configuration; of `server`, the `sections` that the command has."""
    from quire.engine.config_lookup import look_up  # every command would wait for it at its start

    config, _, decisions = look_up(config, usage=usage)
    print(describe_config(config, decisions))
    if server is not None:
        print("\n" + describe_settings(server, sections))
    return 0
