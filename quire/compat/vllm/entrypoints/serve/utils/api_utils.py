"""vLLM's `entrypoints.serve.utils.api_utils`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

__all__ = ["with_cancellation"]

Handler = Callable[..., Awaitable[Any]]


def with_cancellation(handler: Handler) -> Handler:
    """A route handler that is cancelled when its client goes away; it returns None then.

    The handler takes the request as `raw_request`, or as its second positional argument.
    """

    @functools.wraps(handler)
    async def run(*args: Any, **kwargs: Any) -> Any:
        request: Request = kwargs["raw_request"] if "raw_request" in kwargs else args[1]
        work = asyncio.ensure_future(handler(*args, **kwargs))
        watch = asyncio.ensure_future(_gone(request))
        done, pending = await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return work.result() if work in done else None

    return run


async def _gone(request: Request) -> None:
    """Wait until the client of `request`, whose body was read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
