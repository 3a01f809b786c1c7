"""The routes below /debug: the state of the server as JSON and as events, recent requests, settings, sizing.

Made by `server.app`. For operators: where there are several tenants, of an operator's key alone; without keys only
where the server listens on an address that nothing but this machine reaches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.config.build import SECTIONS, SERVER_SECTIONS, all_settings, public_settings
from quire.core.live_state import ChunkRecord
from quire.errors import ValidationError
from quire.server.chat.reading import release
from quire.server.chat.state import ServerParts, ServerState
from quire.server.debug.feed import INTERVAL_S, StateFeed
from quire.server.debug.planning import Planner, PlanRequest
from quire.server.http.errors import FORBIDDEN, OVERLOADED, ApiError
from quire.server.http.origins import is_loopback
from quire.server.http.query import check_query
from quire.server.http.recent_requests import RequestTimeline
from quire.server.http.request_scope import scope_of
from quire.simulator.hardware import HARDWARE
from quire.simulator.interconnect import INTERCONNECTS
from quire.utils.checks import shown
from quire.version import __version__

MAX_VIEWERS = 16
MAX_INTERVAL_S = 60.0
EVENT_STREAM = "text/event-stream"
MAX_PLAN_BYTES = 4096
NO_STORE = {"cache-control": "no-store"}


class DebugRoutes:
    """What operators look at.

    Args:
        sources: the models that are served now.
        parts: of the server.
        is_draining: whether the server is about to end.
    """

    def __init__(
        self, sources: Callable[[], Sequence[ServerState]], parts: ServerParts, is_draining: Callable[[], bool]
    ) -> None:
        self._sources = sources
        self._parts = parts
        self._feed = StateFeed(sources, parts, is_draining)
        self._planner = Planner()

    async def state(self, request: Request) -> Response:
        """What the engines are doing now; as server-sent events for `Accept: text/event-stream` or `stream=true`."""
        self._require_operator(request)
        check_query(request, "since", "stream", "interval")
        query = request.query_params
        since = _number(query.get("since", "0"), "since", 0.0, float("inf"))
        is_stream = query.get("stream") in ("true", "1") or EVENT_STREAM in request.headers.get("accept", "")
        if not is_stream:
            return _json(await self._feed.state(since))
        interval_s = _number(query.get("interval", "1"), "interval", INTERVAL_S, MAX_INTERVAL_S)
        if self._feed.num_viewers >= MAX_VIEWERS:
            raise ApiError(OVERLOADED, f"{MAX_VIEWERS} viewers look at the state already", retry_after_s=5)
        return _View(self._feed, self._events(since, interval_s))

    async def _events(self, since: float, interval_s: float) -> AsyncIterator[bytes]:
        while not self._feed.is_draining():
            state = await self._feed.state(since)
            yield b"event: state\ndata: " + msgspec.json.encode(state) + b"\n\n"
            since = max([since, *(one.series.time[-1] for one in state.models if one.series.time)])
            await asyncio.sleep(interval_s)
        yield b"event: end\ndata: {}\n\n"

    async def requests(self, request: Request) -> Response:
        """When the latest requests were where, the running ones first: phases, events, why prefixes ended."""
        self._require_operator(request)
        check_query(request, "limit", "id")
        recent, peers = self._parts.recent, self._parts.peers
        known = () if recent is None else recent.timelines()
        if peers is not None:
            known = iter(sorted([*known, *await peers.requests()], key=lambda one: (one.status != 0, -one.received)))
        limit = int(_number(request.query_params.get("limit", "100"), "limit", 1, 1000))
        wanted = request.query_params.get("id")
        shown_ones = []
        for one in known:
            if wanted is None or wanted in (one.id, one.request_id):
                shown_ones.append(self._with_chunks(one))
            if len(shown_ones) >= limit:
                break
        return _json({"requests": shown_ones})

    def _with_chunks(self, one: RequestTimeline) -> RequestTimeline:
        handles = dict.fromkeys(event.handle for event in one.events)
        chunks: list[ChunkRecord] = [
            chunk for handle in handles for chunk in self._feed.chunks_of(self._first_name(one.model), handle)
        ]
        if not chunks:
            return one
        found = [
            (
                round(1e3 * (chunk.start_s - one.received_s), 3), round(1e3 * (chunk.end_s - chunk.start_s), 3),
                chunk.first, chunk.num_tokens, chunk.kind,
            ) for chunk in chunks
        ]  # fmt: skip
        return msgspec.structs.replace(one, chunks=found)

    def _first_name(self, model: str) -> str:
        """The name of a model by which the feed knows it."""
        return next((one.model_names[0] for one in self._sources() if model in one.model_names), model)

    async def config(self, request: Request) -> Response:
        """Every setting with its value, its default and what it is for; secrets are hidden."""
        self._require_operator(request)
        models = [
            {
                "model": state.model_names[0],
                "settings": _settings(state.engine.config, SECTIONS, dict(state.engine.config.reasons)),
            }
            for state in self._sources()
        ]
        hardware = [one.name for one in HARDWARE.values()]
        server = _settings(self._parts.config, SERVER_SECTIONS, {})
        return _json(
            {
                "version": __version__, "models": models, "server": server, "plan_hardware": hardware,
                "plan_interconnects": list(INTERCONNECTS),
            }
        )  # fmt: skip

    async def plan(self, request: Request) -> Response:
        """What a deployment of this model would serve, by simulation: as the last line of `quire plan`."""
        self._require_operator(request)
        body = await _read(request)
        try:
            asked = msgspec.json.decode(body, type=PlanRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValidationError(f"the body is not a plan: {error}", hint='send {"hardware": "H100", ...}') from None
        state = self._model(asked.model)
        return _json(await self._planner.plan(asked, state.engine.config.model_path))

    def _model(self, name: str | None) -> ServerState:
        states = list(self._sources())
        if not states:
            raise ValidationError("no model is loaded to plan for", hint="load one", field="model")
        found = [state for state in states if name is None or name in state.model_names]
        if not found:
            raise ValidationError(f"the model {shown(name)} is not loaded", hint="name a loaded one", field="model")
        return found[0]

    def _require_operator(self, request: Request) -> None:
        tenants, http = self._parts.tenants, self._parts.config.http
        if not tenants.may_see_all(scope_of(request).tenant):
            raise ApiError(
                FORBIDDEN,
                "this is about the whole server, and this API key lacks operator rights (operator: true in the key "
                "file)",
            )
        if not tenants.needs_key and http.uds is None and not is_loopback(http.host):
            raise ApiError(
                FORBIDDEN,
                f"without API keys /debug is for loopback addresses alone, and the server listens on {http.host}: "
                "start it with --api-key-file, or listen on 127.0.0.1",
            )


class _View(StreamingResponse):
    """An event stream that counts among the viewers from before its first byte: many may come at once.

    Args:
        feed: counts it.
        events: of the stream.
    """

    def __init__(self, feed: StateFeed, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type=EVENT_STREAM, headers={**NO_STORE, "x-accel-buffering": "no"})
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `StreamingResponse`."""
        self._feed.num_viewers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.num_viewers -= 1


def _settings(config: Any, sections: dict[str, type], reasons: dict[str, str]) -> list[dict[str, Any]]:
    """Settings by name: value, default, doc, and why a rule chose the value; without what is secret."""
    values = public_settings(config, sections)
    return [
        {
            "name": one.info.name, "section": one.section, "value": values[one.info.name],
            "default": one.info.default, "doc": one.info.full_doc,
            "reason": reasons.get(one.info.name),
        } for one in all_settings(sections)
    ]  # fmt: skip


async def _read(request: Request) -> bytes:
    """The small body of a request."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_PLAN_BYTES:
            raise ValidationError(f"the body is larger than {MAX_PLAN_BYTES} bytes")
    release(request)
    return body


def _number(text: str, name: str, low: float, high: float) -> float:
    """A number of the query."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        limit = f"at least {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
        raise ValidationError(f"{name}={shown(text)} is not valid", hint=f"a number, {limit}", field=name)
    return number


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=NO_STORE)
