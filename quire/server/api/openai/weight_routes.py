"""Routes that change what an engine has in memory: its weights, and sleep mode. Owns nothing.

Names and forms of sleep (`/sleep`, `/wake_up`, `/is_sleeping`) and pauses (`/pause`, `/resume`, `/is_paused`) are
vLLM's.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.weight_controls import WAIT_S, WeightControls
from quire.errors import ValidationError
from quire.server.api.openai.operator_routes import JSON, flag, require_operator
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.reading import release
from quire.server.chat.state import ServerState
from quire.server.http.errors import FORBIDDEN, ApiError
from quire.server.http.origins import is_loopback
from quire.server.http.query import check_query
from quire.utils.checks import check_float, shown


class UpdateRequest(msgspec.Struct, kw_only=True):
    """New weights: a model directory of this machine, and how they are called from then on."""

    path: str
    weight_version: str = ""
    drain_timeout: float = 3600.0


UPDATE_FIELDS = RequestFields(UpdateRequest)


class WeightRoutes:
    """The routes; with API keys they are for operators."""

    def __init__(self, state: ServerState, engine: WeightControls) -> None:
        self._state = state
        self._engine = engine

    async def update(self, request: Request) -> Response:
        """Replace the weights, one replica after the other; answers when it is done."""
        self._check(request)
        body, _ = await self._state.bodies.read_fields(request, UPDATE_FIELDS)
        release(request)
        drain_timeout_s = check_float("drain_timeout", body.drain_timeout, minimum=0.0, maximum=WAIT_S)
        await self._engine.update_weights(body.path, body.weight_version, drain_timeout_s)
        return _json(self._versions())

    async def info(self, request: Request) -> Response:
        """Which weights each replica has."""
        self._check(request)
        return _json(self._versions())

    async def sleep(self, request: Request) -> Response:
        """Give back memory; answers when it is done."""
        self._check(request, "level", "mode")
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ValidationError(f"level={shown(level)} is unknown", hint="valid: 0, 1, 2", field="level")
        await self._engine.sleep(int(level), request.query_params.get("mode", "abort"))
        return _json({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        """Get it back; answers when it is done."""
        self._check(request, "tags")
        is_awake = await self._engine.wake_up(request.query_params.getlist("tags") or None)
        return _json({"status": "awake" if is_awake else "sleeping"})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether anything has to be woken up."""
        self._check(request)
        return _json({"is_sleeping": await self._engine.is_sleeping()})

    async def pause(self, request: Request) -> Response:
        """Stop running steps; answers when that is done."""
        self._check(request, "mode", "wait_for_inflight_requests", "clear_cache")
        mode = request.query_params.get("mode", "abort")
        if flag(request, "wait_for_inflight_requests"):  # as the mode was called before
            mode = "wait"
        await self._engine.pause_generation(mode, flag(request, "clear_cache", default="true"))
        return _json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        self._check(request)
        await self._engine.resume_generation()
        return _json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether steps are run."""
        self._check(request)
        return _json({"is_paused": self._state.engine.is_paused})

    def _check(self, request: Request, *names: str) -> None:
        """Refuse who may not ask, and parameters of the query other than `names`."""
        http = self._state.config.http
        if self._state.tenants.needs_key:
            require_operator(request)
        elif http.uds is None and not is_loopback(http.host):
            raise ApiError(FORBIDDEN, "without API keys this is for servers on loopback addresses: use --api-key-file")
        check_query(request, *names)

    def _versions(self) -> dict[str, object]:
        versions = self._engine.weight_versions
        found = sorted(set(versions.values()))
        return {
            "weight_version": found[0] if len(found) == 1 else None,
            "replicas": {str(k): v for k, v in versions.items()},
        }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
