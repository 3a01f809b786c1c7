"""Routes of /v1/responses that need no model: read a response, its items, its events; cancel and delete it.

They own nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.config.server import ServerConfig
from quire.errors import ValidationError
from quire.server.api.responses.event_log import EventLog
from quire.server.api.responses.history import items_page
from quire.server.api.responses.kept import KeptResponses, store_failures, unknown
from quire.server.chat.service import JSON
from quire.server.chat.sse import HEADERS
from quire.server.http.errors import BAD_REQUEST, ApiError
from quire.server.http.request_scope import scope_of
from quire.utils.checks import shown

STREAM_HEADERS = {name.decode(): value.decode() for name, value in HEADERS}


class KeptRoutes:
    """What is asked of responses that were made.

    Args:
        kept: the responses of the server.
        config: of the server.
    """

    def __init__(self, kept: KeptResponses, config: ServerConfig) -> None:
        self._kept = kept
        self._config = config

    async def retrieve(self, request: Request) -> Response:
        """A response that was kept, or that runs; with stream=true the events of one that runs or ran a while ago."""
        tenant, response_id = _path_key(request)
        query = request.query_params
        if query.get("stream", "false").lower() in ("true", "1"):
            return await self._resume_stream(tenant, response_id, query.get("starting_after", "-1"))
        if "starting_after" in query:
            raise ValidationError("starting_after needs stream=true", hint="leave it out", field="starting_after")
        return json_response((await self._kept.find(tenant, response_id)).response)

    async def delete(self, request: Request) -> Response:
        """Forget a response; one that runs is cancelled."""
        key = tenant, response_id = _path_key(request)
        await self._kept.background.delete(key)
        with store_failures():
            if self._kept.store is None or not await self._kept.store.delete(tenant, response_id):
                raise unknown(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is made in the background; one that has ended stays as it is."""
        key = tenant, response_id = _path_key(request)
        live = self._kept.background.get(key)
        if live is not None:
            return json_response(await self._kept.background.cancel(live))
        response = (await self._kept.find(tenant, response_id)).response
        if not response.get("background"):
            raise ApiError(
                BAD_REQUEST, "this is not a background response; close its connection to cancel it",
                param="response_id",
            )  # fmt: skip
        return json_response(response)

    async def input_items(self, request: Request) -> Response:
        """The items of the request that a response answered."""
        stored = await self._kept.find(*_path_key(request))
        query = request.query_params
        return json_response(items_page(stored.input, query.get("order"), query.get("limit"), query.get("after")))

    async def _resume_stream(self, tenant: str, response_id: str, starting_after: str) -> Response:
        """The events of a response after one that the client has."""
        if not starting_after.removeprefix("-").isdecimal():
            raise ValidationError(
                f"starting_after={shown(starting_after)} is not a valid integer", field="starting_after"
            )
        log = self._kept.background.log_of((tenant, response_id))
        if log is not None:
            return followed(log, max(-1, int(starting_after[:20])), self._config)
        await self._kept.find(tenant, response_id)
        raise ApiError(
            BAD_REQUEST,
            "the events of this response are not stored: only responses with background=true and "
                "stream=true keep theirs for a while; retry without stream", param="stream",
        )  # fmt: skip


def followed(log: EventLog, after: int, config: ServerConfig) -> Response:
    """The events of a response after one, as they come."""
    events = log.events(after, config.api.sse_keep_alive_interval)
    return StreamingResponse(events, headers=STREAM_HEADERS)


def json_response(content: dict[str, Any]) -> Response:
    """`content` as it is."""
    return Response(msgspec.json.encode(content), media_type=JSON)


def _path_key(request: Request) -> tuple[str, str]:
    """(tenant, id) that a request is about."""
    return scope_of(request).tenant.name, request.path_params["response_id"]
