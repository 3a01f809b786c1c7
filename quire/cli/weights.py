"""Weights of a running server: which ones each replica has, and new ones from a directory of its machine.

quire weights update /models/mine-v2 --url http://127.0.0.1:8000 --api-key OPERATOR_KEY
quire weights show --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import os

from quire import envs
from quire.errors import ConfigError
from quire.utils.http_get import get, post

SPARE_S = 600.0
"""For which cores may start, beside the time for requests to end."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which server."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--api-key", default=None, help="an operator's key; default: the first of QUIRE_API_KEY")


def show_versions(content: bytes, url: str) -> None:
    """Print the version of each replica."""
    try:
        replicas: dict[str, str] = json.loads(content)["replicas"]
        lines = [f"replica {replica}: {version or '(of the start)'}" for replica, version in sorted(replicas.items())]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{url} is not a Quire server, or one of another version", field="url") from None
    print("\n".join(lines))


def ask_versions(args: argparse.Namespace) -> bytes:
    """What the server says of its weights."""
    return get(args.url, "/weight_info", key_of(args))


def send_update(args: argparse.Namespace) -> bytes:
    """Have the server take new weights; waits until it has."""
    body = {
        "path": os.path.abspath(args.path), "weight_version": args.weight_version, "drain_timeout": args.drain_timeout,
    }  # fmt: skip
    return post(args.url, "/update_weights", key_of(args), body, args.drain_timeout + SPARE_S)


def key_of(args: argparse.Namespace) -> str | None:
    """The API key."""
    keys = envs.api_keys()
    return args.api_key or (keys[0] if keys else None)
