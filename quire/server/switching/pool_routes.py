"""PoolRoutes: the routes of a server of several models: which model a request names, what there is, load and unload.

Made by `server.app.make_pool_app`; own nothing. A request for a model waits until that is in memory, and is then given
to the model's own routes, as if it had come to a server with that model alone.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.build import public_config
from quire.errors import ValidationError
from quire.server.api.openai.info_routes import METRICS_TYPE, PlainRoutes, speculation_info
from quire.server.api.openai.operator_routes import RESETS, resets_running
from quire.server.api.openai.routes import replayed
from quire.server.chat.answered import Route
from quire.server.chat.reading import MOST_MAX_BYTES, BodyReader, release
from quire.server.chat.running import unless_gone
from quire.server.http.errors import FORBIDDEN, ApiError
from quire.server.http.query import check_query
from quire.server.http.request_scope import scope_of
from quire.server.model_routes import ModelPath
from quire.server.switching.life_cycle import ModelState
from quire.server.switching.pool import Lease, ModelPool
from quire.server.switching.served_model import ServedModel
from quire.utils.checks import shown
from quire.version import __version__

LLAMA_STATES = {ModelState.LOADING: "loading", ModelState.READY: "loaded", ModelState.DRAINING: "loaded"}
"""Status of a model in the words of llama.cpp's router; "unloaded" for the others."""


class _Named(msgspec.Struct):
    """As much of a body as says which model it is for, and how long it may wait."""

    model: Any = None
    queue_timeout: Any = None


class ModelName(msgspec.Struct):
    """The body of /models/load and /models/unload."""

    model: str


class PoolRoutes(PlainRoutes):
    """The routes of a server of several models.

    Args:
        pool: the models.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        parts = pool.parts
        self.bodies = BodyReader(parts.config, lambda: MOST_MAX_BYTES, parts.workers, parts.body_budget)

    # --- what one model answers ---

    def by_body(self, path: ModelPath) -> Route:
        """The route of a path whose body names the model."""

        async def answer(request: Request) -> Response:
            known = scope_of(request)
            self._pool.refuse_when_draining()
            known.tenant.check(num_tokens=1)
            body = await self.bodies.read_bytes(request)
            lease, named = known.body, _named(body)
            try:
                model = self._pool.find(_name(named.model))
                hold = await unless_gone(request.receive, self._pool.use(model, _seconds(named.queue_timeout)))
            finally:
                if lease is not None:  # the model's own routes read the body again, and pay for it
                    lease.close()
            return await self._answered(hold, path.path, Request(request.scope, replayed(body, request.receive)))

        return _described(answer, path)

    def by_query(self, path: ModelPath) -> Route:
        """The route of a path whose query names the model."""

        async def answer(request: Request) -> Response:
            model = self._pool.find(request.query_params.get("model"))
            hold = await unless_gone(request.receive, self._pool.use(model))
            return await self._answered(hold, path.path, request)

        return _described(answer, path)

    async def _answered(self, hold: Lease, path: str, request: Request) -> Response:
        scope_of(request).model_wait_s = hold.waited_s
        try:
            response = await hold.model.route(path)(request)
        except BaseException:
            hold.end()
            raise
        return _Held(response, hold)

    # --- the models ---

    async def models(self, request: Request) -> Response:
        """Every name that requests may ask for, and the state of its model."""
        return _json({"object": "list", "data": [self._card(name, one) for name, one in self._pool.names.items()]})

    async def model(self, request: Request) -> Response:
        """One model by name."""
        name = request.path_params["model"]
        return _json(self._card(name, self._pool.find(name)))

    async def load(self, request: Request) -> Response:
        """Load a model; answered when it is ready."""
        model = await self._chosen(request)
        hold = await unless_gone(request.receive, self._pool.use(model))
        hold.end()
        return _json({"success": True, "model": model.name, "load_wait_s": round(hold.waited_s, 3)})

    async def unload(self, request: Request) -> Response:
        """Unload a model as soon as its running requests have ended."""
        model = await self._chosen(request)
        self._pool.dismiss(model)
        return _json({"success": True, "model": model.name, "state": self._pool.slot(model).state.value})

    # --- the server ---

    async def health(self, request: Request) -> Response:
        """The server runs; a model whose engine fails does not change that."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """New work is taken."""
        self._pool.refuse_when_draining()
        return Response(status_code=200)

    async def server_load(self, request: Request) -> Response:
        """Answers that were admitted and have not ended; of several tenants, each sees its own alone."""
        tenant = scope_of(request).tenant
        sees_all = self._pool.parts.tenants.may_see_all(tenant)
        return _json({"server_load": self._pool.num_answers if sees_all else tenant.num_answers})

    async def metrics(self, request: Request) -> Response:
        """Everything counted, for Prometheus; of several tenants, only an operator may read it."""
        self._require_operator(request, "metrics cover the whole server")
        for state in self._pool.loaded_states():
            await state.look_at_processes()
        return Response(self._pool.render_metrics(), headers={"content-type": METRICS_TYPE})

    async def server_info(self, request: Request) -> Response:
        """The engines' settings, of models that are loaded as they were resolved."""
        self._require_operator(request, "server settings are about the whole server")
        configs = {
            model.name: public_config(model.entry.config if model.state is None else model.state.engine.config)
            for model in self._pool.models.values()
        }
        speculation = {
            model.name: speculation_info(model.state.engine.config, model.state.metrics.drafts)
            for model in self._pool.models.values() if model.state is not None
        }  # fmt: skip
        return _json({"version": __version__, "models": configs, "speculative_decoding": speculation})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the cached blocks of the model that the query names, by default of all that are loaded."""
        self._require_operator(request, "the caches are those of all tenants")
        check_query(request, "model", *RESETS)
        name, of_running = request.query_params.get("model"), resets_running(request)
        models = list(self._pool.models.values()) if name is None else [self._pool.find(name)]
        states = [model.state for model in models if model.state is not None]
        done = [await state.engine.reset_prefix_cache(of_running) for state in states]
        return _json({"success": all(done)})

    # --- within ---

    async def _chosen(self, request: Request) -> ServedModel:
        """The model that an operator's request is about."""
        self._require_operator(request, "loading and unloading models is for operators")
        body = await self.bodies.read_bytes(request)
        release(request)
        try:
            name = msgspec.json.decode(body, type=ModelName).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValidationError(
                "the body does not name a model", hint='send {"model": "NAME"}', field="model"
            ) from None
        if not name:
            raise ValidationError("model is empty", hint='send {"model": "NAME"}', field="model")
        return self._pool.find(name)

    def _require_operator(self, request: Request, why: str) -> None:
        if not self._pool.parts.tenants.may_see_all(scope_of(request).tenant):
            raise ApiError(FORBIDDEN, f"{why}; this API key lacks operator rights (operator: true in the key file)")

    def _card(self, name: str, model: ServedModel) -> dict[str, Any]:
        slot, config = self._pool.slot(model), model.entry.config.model
        status: dict[str, Any] = {"value": LLAMA_STATES.get(slot.state, "unloaded")}
        if slot.failure is not None:
            status["failed"] = True
        return {
            "id": name,
            "object": "model",
            "created": self._pool.parts.created,
            "owned_by": "quire",
            "root": config.model,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
            "status": status,
            "state": slot.state.value,
            "pinned": slot.is_pinned,
            "memory_bytes": slot.num_bytes,
            "file_bytes": slot.file_bytes or None,
            "requests_waiting": len(slot.waiting),
            "predicted_wait_s": round(self._pool.schedule.predicted_wait_s(model.name), 3),
        }


class _Held(Response):
    """A response whose model stays in memory until it is sent."""

    def __init__(self, response: Response, hold: Lease) -> None:
        super().__init__()
        self._response = response
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._hold.end()


def _described(route: Route, path: ModelPath) -> Route:
    """`route`, with the name and the description of the model's own."""
    route.__name__, route.__doc__ = path.method.__name__, path.method.__doc__
    return route


def _named(body: bytes) -> _Named:
    """What a body says of its model; what is wrong with the rest is found by the model's own route.

    Raises:
        ValidationError: it is not a JSON object.
    """
    try:
        return msgspec.json.decode(body, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValidationError(f"the body is not a JSON object: {reason}", hint='send {"model": "NAME", ...}') from None


def _name(given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    raise ValidationError(f"model={shown(given)} is not a string", hint="send a model's name", field="model")


def _seconds(given: Any) -> float | None:
    """How long a request may wait; what is no number is refused by the model's own route."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number and given > 0 else None


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
