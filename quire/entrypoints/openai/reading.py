"""The body of an HTTP request, within the limits. No state."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from quire.config.server import LimitsConfig, ServerConfig
from quire.entrypoints.openai.errors import BAD_REQUEST, TIMEOUT, TOO_LARGE, ApiError
from quire.entrypoints.openai.protocol.reading import RequestFields, read_request
from quire.entrypoints.openai.running import ClientGoneError

Fields = TypeVar("Fields", bound=msgspec.Struct)

INLINE_BYTES = 256 << 10


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """The whole body.

    Raises:
        ApiError: it is not JSON by its content type, too long, or too slow.
        ClientGoneError: the client closed the connection first.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(BAD_REQUEST, "the body must be JSON: send content-type application/json")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_receive(request, limits), limits.body_timeout)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(TIMEOUT, f"the body did not arrive within {limits.body_timeout} s") from None


async def _receive(request: Request, limits: LimitsConfig) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_fields(
    request: Request, fields: RequestFields[Fields], config: ServerConfig
) -> tuple[Fields, list[str]]:
    """The typed request, and what there is to say about fields that were not used; a long one is read in a thread.

    Raises:
        ApiError, ClientGoneError: as `read_body`.
        ValidationError, UnsupportedError: as `read_request`.
    """
    limits = config.limits
    body = await read_body(request, limits)

    def read() -> tuple[Fields, list[str]]:
        return read_request(
            body, fields, max_depth=limits.max_json_depth, max_containers=limits.max_json_containers,
            is_strict=config.api.strict_requests,
        )  # fmt: skip

    return read() if len(body) <= INLINE_BYTES else await asyncio.to_thread(read)


def _too_large(limits: LimitsConfig) -> ApiError:
    return ApiError(TOO_LARGE, f"the body is larger than {limits.max_body_bytes} bytes")
