"""The application: routes and middleware around one engine, or around the models of a pool.

Called by the launcher and by tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.engine.protocol import EngineClient, Migratable, Profilable
from quire.engine.weight_controls import WeightControls
from quire.server.absent import no_such_path
from quire.server.api.anthropic.errors import MESSAGES_ERRORS
from quire.server.api.openai.info_routes import InfoRoutes
from quire.server.api.openai.migration_routes import MigrationRoutes, ResumeRequest, SnapshotRequest
from quire.server.api.openai.operator_routes import OperatorRoutes, RestartRequest, ScaleRequest
from quire.server.api.openai.usage_routes import UsageRoutes
from quire.server.api.openai.weight_routes import UpdateRequest, WeightRoutes
from quire.server.api.responses.errors import RESPONSES_ERRORS
from quire.server.api.responses.kept import KeptResponses
from quire.server.api.responses.kept_routes import KeptRoutes
from quire.server.api.responses.store import StoreBackend
from quire.server.chat.answered import RefusalRecord, Route, answered, refused
from quire.server.chat.reading import BodyReader
from quire.server.chat.running import cancelled
from quire.server.chat.state import ServerParts, ServerState, make_state
from quire.server.debug.planning import PlanRequest
from quire.server.debug.routes import DebugRoutes
from quire.server.docs_page import PAGE
from quire.server.http.access import own_path
from quire.server.http.errors import BAD_REQUEST, METHOD_NOT_ALLOWED, NOT_FOUND, ApiError
from quire.server.http.key_watch import KeyWatch
from quire.server.http.keys import ApiKeys, read_checked_keys
from quire.server.http.limit_makers import OWN_LIMITS, LimitMakers
from quire.server.http.middleware import AuthMiddleware, ErrorMiddleware, RequestLog
from quire.server.http.origins import OriginRules
from quire.server.http.peers import Peers
from quire.server.model_routes import MODEL_PATHS, model_routes
from quire.server.openapi import ApiDescription
from quire.server.page.files import PageFiles
from quire.server.switching.pool import ModelPool
from quire.server.switching.pool_routes import ModelName, PoolRoutes

EXPOSED_HEADERS = (
    "x-request-id", "request-id", "retry-after", "retry-after-ms", "x-quire-model-wait",
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)  # fmt: skip
"""Headers of answers that pages of `allowed_origins` may read."""
ERROR_FORMS = (MESSAGES_ERRORS, RESPONSES_ERRORS)


class Application(Starlette):
    """The routes and middleware of one server.

    Attributes:
        prefix: of every path, which a proxy adds; "" = none.
    """

    prefix = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one event of ASGI."""
        if self.prefix:
            scope["root_path"] = self.prefix
        await super().__call__(scope, receive, send)


def make_app(engine: EngineClient, config: ServerConfig, share: FrontEndShare | None = None) -> Application:
    """The ASGI application of one engine; `app.state.server` is its `ServerState`.

    Args:
        share: what it has in common with other front ends on its port; None = there are none.

    Raises:
        ConfigError: the API keys cannot be read, or the file of responses cannot be used.
    """

    def read_keys() -> ApiKeys:
        return read_checked_keys(config, engine.config.scheduler.scheduling_policy)

    share = share or FrontEndShare()
    state = make_state(engine, config, read_keys(), share.limits, share.peers)
    kept = KeptResponses(config.responses, share.shelf)
    kept.background.others = share.peers
    life = ServerLife(state.parts, read_keys, state.bodies, engine.check_health, kept.close)
    routes = Routes(_application(life), state)
    of_model = model_routes(state, kept)
    for one in MODEL_PATHS:
        routes.add(one.path, of_model[one.path], one.body)
    routes.add_common(kept, state.parts)
    info = InfoRoutes(state)
    for path in ("/v1/models", "/v1/models/", "/models"):
        routes.add(path, info.models)
    routes.add("/v1/models/{model:path}", info.model)
    routes.add_debug(lambda: [state], state.parts, lambda: state.is_draining)
    root = routes.add_page(info.root, state.parts)
    routes.add_info(root, info.health, info.live, info.ready, info.version, info.load, info.metrics)
    if state.tenants.needs_key:
        routes.add("/reset_prefix_cache", OperatorRoutes(state).reset_prefix_cache, method="POST")
        routes.add("/server_info", info.server_info)
        if engine.config.parallel.data_parallel_size > 1:
            routes.add("/scale_elastic_ep", OperatorRoutes(state).scale, body=ScaleRequest)
            routes.add("/restart_replicas", OperatorRoutes(state).restart_replicas, body=RestartRequest)
        if engine.config.observability.profiler is not None and isinstance(engine, Profilable):
            routes.add("/start_profile", OperatorRoutes(state).start_profile, method="POST")
            routes.add("/stop_profile", OperatorRoutes(state).stop_profile, method="POST")
        if isinstance(engine, WeightControls):
            weights = WeightRoutes(state, engine)
            routes.add("/update_weights", weights.update, body=UpdateRequest)
            routes.add("/weight_info", weights.info)
            routes.add_pauses(weights)
        if isinstance(engine, Migratable):
            routes.add("/snapshot_request", MigrationRoutes(state).snapshot, body=SnapshotRequest)
            routes.add("/resume_request", MigrationRoutes(state).resume, body=ResumeRequest)
    if isinstance(engine, WeightControls) and engine.config.supervision.enable_sleep_mode:
        weights = WeightRoutes(state, engine)
        routes.add("/sleep", weights.sleep, method="POST")
        routes.add("/wake_up", weights.wake_up, method="POST")
        routes.add("/is_sleeping", weights.is_sleeping)
        if not state.tenants.needs_key:
            routes.add_pauses(weights)
    routes.app.state.server = state
    return routes.app


def make_pool_app(pool: ModelPool, policy: str) -> Application:
    """The ASGI application of several models; `app.state.server` is the pool.

    Args:
        policy: the scheduling_policy of its engines.

    Raises:
        ConfigError: the API keys cannot be read.
    """

    def read_keys() -> ApiKeys:
        return read_checked_keys(pool.config, policy)

    own = PoolRoutes(pool)
    routes = Routes(_application(ServerLife(pool.parts, read_keys, own.bodies, pool.start, pool.close)), pool.parts)
    for one in MODEL_PATHS:
        routes.add(one.path, own.by_query(one) if one.body is None else own.by_body(one), one.body)
    routes.add_common(pool.kept, pool.parts)
    for path in ("/v1/models", "/v1/models/", "/models"):
        routes.add(path, own.models)
    routes.add("/v1/models/{model:path}", own.model)
    routes.add("/models/load", own.load, ModelName)
    routes.add("/models/unload", own.unload, ModelName)
    routes.add_debug(pool.loaded_states, pool.parts, lambda: pool.is_draining)
    root = routes.add_page(own.root, pool.parts)
    routes.add_info(root, own.health, own.live, own.ready, own.version, own.server_load, own.metrics)
    if pool.parts.tenants.needs_key:
        routes.add("/reset_prefix_cache", own.reset_prefix_cache, method="POST")
        routes.add("/server_info", own.server_info)
    routes.app.state.server = pool
    return routes.app


@dataclass(frozen=True, slots=True)
class FrontEndShare:
    """What a front end has in common with others on its port; the defaults are those of one that is alone.

    Attributes:
        limits: makes what counts.
        shelf: where responses are stored; None = as the settings say.
        peers: the others.
    """

    limits: LimitMakers = OWN_LIMITS
    shelf: StoreBackend | None = None
    peers: Peers | None = None


class ServerLife:
    """What begins and ends with the application.

    Args:
        parts: of the server.
        read_keys: reads the keys again.
        bodies: whose memory is given back.
        begin, end: of the engine, or the pool.
    """

    def __init__(
        self,
        parts: ServerParts,
        read_keys: Callable[[], ApiKeys],
        bodies: BodyReader,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.parts = parts
        self._read_keys = read_keys
        self._bodies = bodies
        self._begin = begin
        self._end = end

    @asynccontextmanager
    async def run(self, _: Starlette) -> AsyncIterator[None]:
        """The application runs within."""
        parts, key_file = self.parts, self.parts.config.api.api_key_file
        await self._begin()
        if parts.tracing is not None:
            parts.tracing.start()
        background = [asyncio.create_task(self._bodies.give_back_memory())]
        if key_file is not None:
            background.append(asyncio.create_task(KeyWatch(key_file, self._read_keys, parts.tenants).run()))
        yield
        await self._end()
        for task in background:
            await cancelled(task)
        await parts.close()


def _application(life: ServerLife) -> Application:
    """An application without routes."""
    parts, config = life.parts, life.parts.config
    app = Application(lifespan=life.run, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False  # a redirect repeats the client's Host, and has no error in our form
    app.prefix = config.http.root_path
    app.state.parts = parts
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(
        AuthMiddleware,
        tenants=parts.tenants,
        limits=config.limits,
        metrics=parts.metrics,
        origins=OriginRules(config.http),
    )
    app.add_middleware(
        RequestLog, is_logged=not config.http.disable_access_log, tracing=parts.tracing, error_forms=ERROR_FORMS,
        quiet_paths=frozenset(config.http.disable_access_log_for_endpoints), metrics=parts.metrics.http,
        recent=parts.recent,
    )  # fmt: skip
    if config.http.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.http.allowed_origins, allow_methods=config.http.allowed_methods,
            allow_headers=config.http.allowed_headers, allow_credentials=config.http.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip
    return app


class Routes:
    """Adds routes to an application, and describes them.

    Args:
        app: gets them.
        refusals: counts what they refuse.
    """

    def __init__(self, app: Application, refusals: RefusalRecord) -> None:
        self.app = app
        self._refusals = refusals
        self._description = ApiDescription()

    def add(self, path: str, route: Route, body: type | None = None, method: str = "GET") -> None:
        """Answer a path; one with a body is a POST."""
        method = method if body is None else "POST"
        self._description.add(path, method, route, body)
        self.app.add_route(path, answered(route, self._refusals), methods=[method])

    def add_common(self, kept: KeptResponses, parts: ServerParts) -> None:
        """What is about responses that were made."""
        responses, peers = KeptRoutes(kept, parts.config), parts.peers

        def made(route: Route) -> Route:
            """The route, where its response is made."""
            return route if peers is None else peers.where_made(route, kept.background.has)

        self.add("/v1/responses/{response_id}", made(responses.retrieve))
        self.add("/v1/responses/{response_id}", made(responses.delete), method="DELETE")
        self.add("/v1/responses/{response_id}/cancel", made(responses.cancel), method="POST")
        self.add("/v1/responses/{response_id}/input_items", responses.input_items)
        self.add("/v1/usage", UsageRoutes(parts).usage)
        if not parts.config.http.disable_fastapi_docs:
            self.add("/openapi.json", self._openapi)
            self.add("/docs", _docs)

    def add_pauses(self, weights: WeightRoutes) -> None:
        """Of steps, for trainers."""
        self.add("/pause", weights.pause, method="POST")
        self.add("/resume", weights.resume, method="POST")
        self.add("/is_paused", weights.is_paused)

    def add_debug(
        self, sources: Callable[[], Sequence[ServerState]], parts: ServerParts, is_draining: Callable[[], bool]
    ) -> None:
        """What operators look at, unless it is off.

        Args:
            sources: the models that are served now.
            is_draining: whether the server is about to end, which ends streams of events.
        """
        if parts.config.http.disable_debug:
            return
        debug = DebugRoutes(sources, parts, is_draining)
        self.add("/debug/state", debug.state)
        self.add("/debug/requests", debug.requests)
        self.add("/debug/config", debug.config)
        self.add("/debug/plan", debug.plan, PlanRequest)

    def add_page(self, root: Route, parts: ServerParts) -> Route:
        """The page, unless it is off; returns the route of `/`, which is `root` for clients that are not browsers."""
        if parts.config.http.disable_page:
            return root
        page = PageFiles()
        self.add("/page/{name}", page.file)
        return page.root(root)

    def add_info(
        self, root: Route, health: Route, live: Route, ready: Route, version: Route, load: Route, metrics: Route
    ) -> None:
        """How the server is."""
        self.add("/", root)
        self.add("/health", health)
        self.add("/live", live)
        self.add("/ready", ready)
        self.add("/ping", health)
        self.add("/ping", health, method="POST")
        self.add("/version", version)
        self.add("/load", load)
        self.add("/metrics", metrics)

    async def _openapi(self, _: Request) -> Response:
        """This description of the API."""
        return JSONResponse(self._description.document)


async def _docs(request: Request) -> Response:
    """A page that shows what /openapi.json describes."""
    return Response(PAGE, media_type="text/html")


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals, from the catalogue."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    if status == METHOD_NOT_ALLOWED.status:
        return _wrong_method(request)
    if status == NOT_FOUND.status:
        refusal = no_such_path(own_path(request.scope))
    else:
        refusal = ApiError(BAD_REQUEST, "the request is malformed")
    return refused(request, refusal, request.app.state.parts)


def _wrong_method(request: Request) -> Response:
    methods = ", ".join(_methods(request))
    refusal = ApiError(METHOD_NOT_ALLOWED, f"method {request.method} is not allowed here (use {methods})")
    response = refused(request, refusal, request.app.state.parts)
    response.headers["allow"] = methods
    return response


def _methods(request: Request) -> list[str]:
    """What may be asked of the path of a request."""
    of_path = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in of_path for method in getattr(route, "methods", None) or ()})
