"""New weights for a running server, without losing a request: `quire weights update PATH`."""

from __future__ import annotations

import argparse

from quire.cli.weights import add_server_arguments, send_update, show_versions
from quire.utils.checks import check_float

DRAIN_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("path", help="directory of a model of the same shape, on the server's machine")
    parser.add_argument("--weight-version", default="", help="how the weights are called; default: as the directory is")
    parser.add_argument(
        "--drain-timeout", type=float, default=DRAIN_TIMEOUT_S, metavar="SECONDS",
        help="time that running requests have to finish with the old weights",
    )  # fmt: skip
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Wait until every replica has them."""
    check_float("drain_timeout", args.drain_timeout, minimum=0.0, maximum=86_400.0)
    show_versions(send_update(args), args.url)
    return 0
