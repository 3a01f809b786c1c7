"""vLLM's `entrypoints.launchers.launcher`: run a web application until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any

import uvicorn

from quire.errors import require_unset

__all__ = ["serve_http"]


async def serve_http(
    app: Any, sock: socket.socket | None, enable_ssl_refresh: bool = False, **uvicorn_kwargs: Any
) -> Awaitable[None]:
    """Serve `app` until SIGINT or SIGTERM.

    Args:
        app: an ASGI application.
        sock: where to listen; None = at `host` and `port` of `uvicorn_kwargs`.
        enable_ssl_refresh: refused; `quire serve` can do it.
        uvicorn_kwargs: as `uvicorn.Config`.

    Returns:
        What is awaited for the end of the shutdown, which is over by then.
    """
    require_unset(enable_ssl_refresh=enable_ssl_refresh)
    server = uvicorn.Server(uvicorn.Config(app, **uvicorn_kwargs))
    await server.serve(sockets=None if sock is None else [sock])
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    over.set_result(None)
    return over
