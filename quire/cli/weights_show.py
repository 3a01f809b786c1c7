"""Which weights each replica of a running server has: `quire weights show`."""

from __future__ import annotations

import argparse

from quire.cli.weights import add_server_arguments, ask_versions, show_versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    show_versions(ask_versions(args), args.url)
    return 0
