"""Where the server listens; an address is claimed before anything costly is started. Called by `quire serve`."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from quire.config.server import HttpConfig
from quire.errors import ConfigError


def claim_address(http: HttpConfig) -> list[socket.socket] | None:
    """Sockets bound to the host's addresses and the port, not listening yet; None for a Unix socket, which is tried.

    Raises:
        ConfigError: the address is in use, or not this machine's; or the path of the Unix socket cannot be used.
    """
    if http.uds is not None:
        claim_socket_path(http.uds)
        Path(http.uds).unlink()
        return None
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(http.host, http.port, error.strerror or str(error)) from None
    bound: list[socket.socket] = []
    problem = ""
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            # With port 0 the first address chooses the port of the others.
            port = bound[0].getsockname()[1] if bound else http.port
            bound.append(_bind(family, (address[0], port, *address[2:])))
        except OSError as error:
            problem = problem or error.strerror or str(error)
    if not bound:
        raise cannot_listen(http.host, http.port, problem)
    return bound


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(name: Any, *, is_tls: bool) -> str:
    """The URL of a socket's own name, or its path."""
    if isinstance(name, str):
        return name
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if is_tls else 'http'}://{host}:{name[1]}"


def cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    """The error of an address that cannot be listened on."""
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason[:1].lower()}{reason[1:]}",
        hint="stop the program that listens there, or choose another --port or --host",
        field="port",
    )


def claim_socket_path(path: str) -> None:
    """Leave an unused socket at `path`, which only this user can connect to: uvicorn's own takes over its mode.

    One that a server left behind is replaced.

    Raises:
        ConfigError: a server listens there, or the path cannot be used.
    """
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(path)
            raise ConfigError(f"another server listens on {path}", hint="stop it, or choose another --uds", field="uds")
        if Path(path).is_socket():
            Path(path).unlink()
        with socket.socket(socket.AF_UNIX) as unused:
            before = os.umask(0o177)
            try:
                unused.bind(path)
            finally:
                os.umask(before)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}",
            hint="--uds takes a short path that is free, in a directory that this user can write to", field="uds",
        ) from None  # fmt: skip
