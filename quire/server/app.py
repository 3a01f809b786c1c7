"""The application: routes and middleware around one engine. Called by the launcher and by tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.engine.protocol import EngineClient
from quire.server.absent import no_such_path
from quire.server.api.anthropic.errors import MESSAGES_ERRORS
from quire.server.api.anthropic.protocol import MessagesRequest
from quire.server.api.anthropic.routes import MessagesRoutes
from quire.server.api.openai.batch_chat import BatchChatRequest, BatchChatRoutes
from quire.server.api.openai.info_routes import InfoRoutes
from quire.server.api.openai.operator_routes import OperatorRoutes
from quire.server.api.openai.protocol.completion import CompletionRequest
from quire.server.api.openai.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.api.openai.routes import GenerationRoutes
from quire.server.api.responses.errors import RESPONSES_ERRORS
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.routes import ResponsesRoutes
from quire.server.chat.answered import Route, answered, refused
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.running import cancelled
from quire.server.chat.service import ChatService
from quire.server.chat.state import ServerState, make_state
from quire.server.docs_page import PAGE
from quire.server.http.access import own_path
from quire.server.http.errors import BAD_REQUEST, METHOD_NOT_ALLOWED, NOT_FOUND, ApiError
from quire.server.http.key_watch import KeyWatch
from quire.server.http.keys import ApiKeys, read_checked_keys
from quire.server.http.middleware import AuthMiddleware, ErrorMiddleware, RequestLog
from quire.server.http.origins import OriginRules
from quire.server.openapi import ApiDescription

EXPOSED_HEADERS = (
    "x-request-id", "request-id", "retry-after", "retry-after-ms",
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


def make_app(engine: EngineClient, config: ServerConfig) -> Application:
    """The ASGI application; `app.state.server` is its `ServerState`.

    Raises:
        ConfigError: the API keys cannot be read, or the file of responses cannot be used.
    """

    def read_keys() -> ApiKeys:
        return read_checked_keys(config, engine.config.scheduler.scheduling_policy)

    state = make_state(engine, config, read_keys())
    service = ChatService(state)
    responses = ResponsesRoutes(state, service)

    @asynccontextmanager
    async def lifespan(_: Application) -> AsyncIterator[None]:
        await engine.check_health()
        if state.tracing is not None:
            state.tracing.start()
        background = [asyncio.create_task(state.bodies.give_back_memory())]
        if config.api.api_key_file is not None:
            watch = KeyWatch(config.api.api_key_file, read_keys, state.tenants)
            background.append(asyncio.create_task(watch.run()))
        yield
        await responses.close()
        for task in background:
            await cancelled(task)
        state.keep_alive.close()
        state.workers.close()
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)

    app = Application(lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.prefix = config.http.root_path
    app.state.server = state
    _add_routes(app, state, service, responses)
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(
        AuthMiddleware,
        tenants=state.tenants,
        limits=config.limits,
        metrics=state.metrics,
        origins=OriginRules(config.http),
    )
    app.add_middleware(
        RequestLog, is_logged=not config.http.disable_access_log, tracing=state.tracing, error_forms=ERROR_FORMS,
        quiet_paths=frozenset(config.http.disable_access_log_for_endpoints), metrics=state.metrics.http,
    )  # fmt: skip
    if config.http.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.http.allowed_origins, allow_methods=config.http.allowed_methods,
            allow_headers=config.http.allowed_headers, allow_credentials=config.http.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip
    return app


def _add_routes(app: Application, state: ServerState, service: ChatService, responses: ResponsesRoutes) -> None:
    generation = GenerationRoutes(state, service)
    info = InfoRoutes(state)
    messages = MessagesRoutes(state, service)

    description = ApiDescription()

    def add(path: str, route: Route, body: type | None = None, method: str = "GET") -> None:
        method = method if body is None else "POST"
        description.add(path, method, route, body)
        app.add_route(path, answered(route, state), methods=[method])

    async def openapi(_: Request) -> Response:
        """This description of the API."""
        return JSONResponse(description.document)

    add("/v1/completions", generation.completion, CompletionRequest)
    add("/v1/chat/completions", generation.chat, ChatRequest)
    add("/v1/chat/completions/batch", BatchChatRoutes(state, service).answer, BatchChatRequest)
    add("/v1/responses", responses.create, ResponsesRequest)
    add("/v1/responses/input_tokens", responses.input_tokens, ResponsesRequest)
    add("/v1/responses/{response_id}", responses.retrieve)
    add("/v1/responses/{response_id}", responses.delete, method="DELETE")
    add("/v1/responses/{response_id}/cancel", responses.cancel, method="POST")
    add("/v1/responses/{response_id}/input_items", responses.input_items)
    add("/v1/messages", messages.answer, MessagesRequest)
    add("/v1/messages/count_tokens", messages.count_tokens, MessagesRequest)
    add("/invocations", generation.invocation, ChatRequest)
    add("/v1/models", info.models)
    add("/v1/models/", info.models)
    add("/v1/models/{model:path}", info.model)
    add("/tokenize", info.tokenize, TokenizeRequest)
    add("/detokenize", info.detokenize, DetokenizeRequest)
    add("/", info.root)
    add("/health", info.health)
    add("/live", info.live)
    add("/ready", info.ready)
    add("/ping", info.health)
    add("/ping", info.health, method="POST")
    add("/version", info.version)
    add("/tokenizer_info", info.tokenizer_info)
    add("/load", info.load)
    add("/metrics", info.metrics)
    if not state.config.http.disable_fastapi_docs:
        add("/openapi.json", openapi)
        add("/docs", _docs)
    if state.tenants.needs_key:
        add("/reset_prefix_cache", OperatorRoutes(state).reset_prefix_cache, method="POST")
        add("/server_info", info.server_info)


async def _docs(request: Request) -> Response:
    """A page that shows what /openapi.json describes."""
    return Response(PAGE, media_type="text/html")


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals, from the catalogue."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    if status == NOT_FOUND.status:
        refusal = no_such_path(own_path(request.scope))
    elif status == METHOD_NOT_ALLOWED.status:
        refusal = ApiError(METHOD_NOT_ALLOWED, f"method {request.method} is not allowed here")
    else:
        refusal = ApiError(BAD_REQUEST, "the request is malformed")
    return refused(request, refusal, request.app.state.server)
