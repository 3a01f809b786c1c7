"""BodyReader: the body of an HTTP request, within the limits.

Made by `state.make_state`, used by the routes. Long bodies are decoded in the threads that tenants share. Owns the
budget of all bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from quire.config.server import ServerConfig
from quire.server.chat.protocol.reading import RequestFields, read_request
from quire.server.chat.protocol.warnings import Warnings
from quire.server.http.body_budget import BodyBudget, BodyLease, no_room
from quire.server.http.errors import (
    BAD_REQUEST,
    TIMEOUT,
    TOO_LARGE,
    UNSUPPORTED_MEDIA,
    ApiError,
    ClientGoneError,
)
from quire.server.http.prompt_workers import PromptWorkers
from quire.server.http.request_scope import scope_of
from quire.utils.heap import give_back_free_memory

Fields = TypeVar("Fields", bound=msgspec.Struct)

INLINE_BYTES = 256 << 10
BYTES_PER_CHAR = 16  # of a prompt: an escaped character has up to 12, and there is more in a body than its prompt
LEAST_PAUSE_S = 0.005  # shorter ones add up to the next that is taken
TRIM_S, TRIM_BYTES = 5.0, 8 << 20
LEAST_MAX_BYTES, MOST_MAX_BYTES = 4 << 20, 32 << 20


class BodyReader:
    """Reads bodies.

    Args:
        config: of the server.
        max_chars: says how many characters a prompt of the model can have; asked when that matters.
        workers: decode what is long.
        budget: of all bodies.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_chars: Callable[[], int],
        workers: PromptWorkers,
        budget: BodyBudget,
    ) -> None:
        self._limits = config.limits
        self._is_strict = config.api.strict_requests
        self._max_chars = max_chars
        self._workers = workers
        self.budget = budget
        ids = config.limits.max_id_entries
        self._max_lengths = {
            "stop": config.limits.max_stop_strings,
            "stop_token_ids": ids, "allowed_token_ids": ids, "logit_bias": ids,
        }  # fmt: skip

    async def read_fields(self, request: Request, fields: RequestFields[Fields]) -> tuple[Fields, Warnings]:
        """The typed request, with warnings of the fields that were not used; `release` follows.

        Raises:
            ApiError: the body is not JSON by its headers, too long, or too slow; or there is no room for it now.
            ClientGoneError: the client closed the connection first.
            ValidationError, UnsupportedError: as `read_request`.
        """
        body = await self.read_bytes(request)
        limits = self._limits

        def read() -> tuple[Fields, Warnings]:
            return read_request(
                body, fields, max_depth=limits.max_json_depth, max_containers=limits.max_json_containers,
                max_entries=limits.max_json_entries, max_lengths=self._max_lengths, is_strict=self._is_strict,
            )  # fmt: skip

        if len(body) <= INLINE_BYTES:
            return read()
        return await self._workers.run(scope_of(request).tenant.name, len(body), read)

    async def give_back_memory(self) -> None:
        """Return to the system what many bodies left in the heap, once few are held; runs until cancelled.

        The C library keeps freed memory below what is still in use, which was several times the bodies' bytes.
        """
        given_back = 0
        while True:
            await asyncio.sleep(TRIM_S)
            budget = self.budget
            if budget.num_bytes < TRIM_BYTES <= budget.num_bytes_ever - given_back:
                given_back = budget.num_bytes_ever
                await asyncio.to_thread(give_back_free_memory)

    def note_unread(self, request: Request) -> None:
        """The body of a request that is refused for its head passes through the heap all the same."""
        length = request.headers.get("content-length", "")
        self.budget.num_bytes_ever += min(LEAST_MAX_BYTES, int(length[:20])) if length.isdecimal() else 0

    async def read_bytes(self, request: Request) -> bytes:
        """The whole body; `release` follows.

        Raises:
            ApiError, ClientGoneError: as `read_fields`.
        """
        _check_headers(request)
        limits = self._limits
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._most(int(length[:20])):
            self.note_unread(request)
            raise self._too_large()
        known = scope_of(request)
        lease = known.body = self.budget.open(known.tenant.name)
        try:
            return await asyncio.wait_for(self._receive(request, lease), limits.body_timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise ApiError(TIMEOUT, f"the body did not arrive within {limits.body_timeout} s") from None
        except asyncio.CancelledError:
            if lease.is_given_up:
                raise no_room() from None
            raise

    async def _receive(self, request: Request, lease: BodyLease) -> bytes:
        lease.receive_in(asyncio.current_task())
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            lease.take(len(part))
            is_whole = not message.get("more_body", False)
            if is_whole and not body:
                body_bytes = part
            else:
                body += part
                body_bytes = b""
            if lease.num_bytes > self._most(lease.num_bytes):
                raise self._too_large()
            if is_whole:
                lease.note_whole()
                return body_bytes or bytes(body)
            pause_s = self.budget.pause_s(lease, len(part))
            if pause_s > LEAST_PAUSE_S:
                await asyncio.sleep(pause_s)

    def _most(self, num_bytes: int) -> int:
        """The most bytes of a body; no less than `num_bytes` when any model can use so many."""
        if self._limits.max_body_bytes is not None:
            return self._limits.max_body_bytes
        if num_bytes <= LEAST_MAX_BYTES:
            return LEAST_MAX_BYTES
        return min(MOST_MAX_BYTES, max(LEAST_MAX_BYTES, BYTES_PER_CHAR * self._max_chars()))

    def _too_large(self) -> ApiError:
        most = self._most(MOST_MAX_BYTES)
        return ApiError(TOO_LARGE, f"the body is larger than {most} bytes (max_body_bytes)")


def release(request: Request) -> None:
    """The body of `request` is no longer held; harmless when repeated."""
    lease = scope_of(request).body
    if lease is not None:
        lease.close()


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(BAD_REQUEST, "the body must be JSON: send content-type application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            UNSUPPORTED_MEDIA, "content-encoding other than identity is not supported: send the body uncompressed",
            param="content-encoding",
        )  # fmt: skip
