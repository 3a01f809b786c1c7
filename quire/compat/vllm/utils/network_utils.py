"""vLLM's `utils.network_utils`."""

from __future__ import annotations

import socket

__all__ = ["get_ip", "get_open_port"]


def get_ip() -> str:
    """The address of this machine that other programs on it can reach."""
    return "127.0.0.1"


def get_open_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
