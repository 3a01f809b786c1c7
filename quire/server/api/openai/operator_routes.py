"""Routes that change the server, for operators' API keys alone; a server without keys has none. Owns nothing."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.config.device import MAX_REPLICAS
from quire.engine.protocol import Profilable, Scalable
from quire.errors import UnsupportedError, ValidationError
from quire.logger import get_logger
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.reading import release
from quire.server.chat.state import ServerState
from quire.server.http.errors import CONFLICT, FORBIDDEN, ApiError
from quire.server.http.query import check_query
from quire.server.http.request_scope import scope_of
from quire.utils.checks import check_float, check_int, shown

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
IN_USE = "KV blocks are in use; with reset_running_requests=true running requests are preempted and recompute theirs"

MAX_DRAIN_S = 86_400.0
JSON = "application/json"

logger = get_logger(__name__)


class ScaleRequest(msgspec.Struct, kw_only=True):
    """How many replicas there shall be."""

    new_data_parallel_size: int
    drain_timeout: float = 120.0


class RestartRequest(msgspec.Struct, kw_only=True):
    """Replicas are to be restarted one by one."""

    drain_timeout: float = 120.0


SCALE_FIELDS = RequestFields(ScaleRequest)
RESTART_FIELDS = RequestFields(RestartRequest)
RESETS = ("reset_running_requests", "reset_external")


class OperatorRoutes:
    """The routes that change the server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached pages; `success` is false, and nothing done, while any page is in use."""
        require_operator(request)
        check_query(request, *RESETS)
        is_done = await self._state.engine.reset_prefix_cache(resets_running(request))
        logger.info("prefix cache: %s", "reset" if is_done else "not reset: KV blocks are in use")
        answer = {"success": is_done} if is_done else {"success": False, "message": IN_USE}
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def scale(self, request: Request) -> Response:
        """Add or remove replicas, as vLLM's route of this name; answers when it is done."""
        require_operator(request)
        body, _ = await self._state.bodies.read_fields(request, SCALE_FIELDS)
        release(request)
        engine = self._replicas()
        size = check_int("new_data_parallel_size", body.new_data_parallel_size, 1, MAX_REPLICAS)
        logger.info("replicas: %d are there, %d are asked for", engine.data_parallel_size, size)
        await engine.scale(size, _drain_timeout(body.drain_timeout))
        answer = {"message": f"Scaled to {size} data parallel engines", "data_parallel_size": engine.data_parallel_size}
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def restart_replicas(self, request: Request) -> Response:
        """Restart the replicas one by one, with what the model's files hold now; answers when it is done."""
        require_operator(request)
        body, _ = await self._state.bodies.read_fields(request, RESTART_FIELDS)
        release(request)
        engine = self._replicas()
        logger.info("replicas: %d are restarted one by one", engine.data_parallel_size)
        await engine.restart_replicas(_drain_timeout(body.drain_timeout))
        return Response(msgspec.json.encode({"data_parallel_size": engine.data_parallel_size}), media_type=JSON)

    async def start_profile(self, request: Request) -> Response:
        """Record steps from the next one on; 409 while they are."""
        return await self._profile(request, True, "a profile is being taken; end it with POST /stop_profile")

    async def stop_profile(self, request: Request) -> Response:
        """Write the profile, and answer when that is done; 409 where none is taken."""
        return await self._profile(request, False, "no profile is being taken; begin with POST /start_profile")

    async def _profile(self, request: Request, starts: bool, refusal: str) -> Response:
        require_operator(request)
        check_query(request)
        engine = self._state.engine
        assert isinstance(engine, Profilable), "the route is there for engines that are"
        config = engine.config.observability.profiler
        if not await engine.profile(starts):
            raise ApiError(CONFLICT, refusal)
        logger.info("profile: %s", "started" if starts else "written")
        directory = None if config is None else config.torch_profiler_dir
        return Response(msgspec.json.encode({"is_profiling": starts, "directory": directory}), media_type=JSON)

    def _replicas(self) -> Scalable:
        """The engine; raises `UnsupportedError` if it has no replicas."""
        engine = self._state.engine
        if not isinstance(engine, Scalable):
            raise UnsupportedError("this server's engine has no replicas", hint="start with data_parallel_size=2")
        return engine


def require_operator(request: Request) -> None:
    """Raise `ApiError` unless the request has an operator's key."""
    if not scope_of(request).tenant.is_operator:
        raise ApiError(FORBIDDEN, "this API key lacks operator rights (operator: true in the key file)")


def _drain_timeout(seconds: float) -> float:
    return check_float("drain_timeout", seconds, minimum=0.0, maximum=MAX_DRAIN_S)


def resets_running(request: Request) -> bool:
    """Whether a request to forget cached blocks means those of running requests, too.

    Raises:
        UnsupportedError, ValidationError: it asks for something else.
    """
    if flag(request, "reset_external"):
        raise UnsupportedError(
            "reset_external is not supported: there is no cache outside of the engine",
            hint="leave it out", field="reset_external",
        )  # fmt: skip
    return flag(request, "reset_running_requests")


def flag(request: Request, name: str, default: str = "false") -> bool:
    """A truth value of the query; `default` when it is not there.

    Raises:
        ValidationError: it is none.
    """
    value = request.query_params.get(name, default)
    if value.lower() not in BOOLEANS:
        raise ValidationError(f"{name}={shown(value)} is not a valid boolean", hint="use true or false", field=name)
    return BOOLEANS[value.lower()]
