"""What happens to every HTTP request before and after its route. Plain ASGI: nothing stands between a stream and its
client.

Owns nothing that changes but the number of requests under way.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.server import LimitsConfig
from quire.core.stats import RequestStateStats
from quire.logger import get_logger
from quire.metrics.http_metrics import HttpMetrics
from quire.metrics.server_metrics import ServerMetrics
from quire.server.http.access import PROBE_PATHS, is_open
from quire.server.http.error_forms import ErrorForm, form_of
from quire.server.http.errors import (
    BAD_REQUEST,
    HEADERS_TOO_LARGE,
    UNAUTHORIZED,
    ApiError,
    ClientGoneError,
    api_error_of,
)
from quire.server.http.origins import OriginRules
from quire.server.http.peers import FORWARDED
from quire.server.http.recent_requests import RecentRequests
from quire.server.http.request_scope import RequestScope, begin, scope_of
from quire.server.http.tenants import Tenants
from quire.server.http.timing_breakdown import make_receipt
from quire.server.http.tracing import HEADERS as TRACE_HEADERS
from quire.server.http.tracing import EndedRequest, Tracing

access_logger = get_logger("quire.access")

QUIET_PATHS = frozenset((*PROBE_PATHS, "/metrics", "/load", "/debug/state"))
MAX_LOGGED_CHARS = 200
WEIGHT_VERSION = b"x-quire-weight-version"
MODEL_WAIT = b"x-quire-model-wait"
"""Header: seconds that a request waited for its model to be loaded."""
REQUEST_ID = re.compile(rb"[\w.:+-]{1,128}", re.ASCII)


class RequestLog:
    """Gives every request an id (the client's own X-Request-Id where it is usable), and logs a line when it ends."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_logged: bool = True,
        tracing: Tracing | None = None,
        error_forms: Sequence[ErrorForm] = (),
        quiet_paths: frozenset[str] = frozenset(),
        metrics: HttpMetrics | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._recent = recent
        self._quiet_paths = QUIET_PATHS | quiet_paths
        self._error_forms = error_forms
        self._tracing = tracing
        self._is_logged = is_logged
        self.num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        own_id = given if given is not None and REQUEST_ID.fullmatch(given) else None
        request_id = own_id or secrets.token_hex(16).encode()
        start, form = time.monotonic(), form_of(scope, self._error_forms)
        known = RequestScope(request_id.decode(), start, form, has_unusable_id=given != own_id)
        begin(scope, known)
        id_headers = [(b"x-request-id", request_id)]
        if form is not None and form.id_header is not None:
            id_headers.append((form.id_header, request_id))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers]
                if known.model_wait_s:
                    message["headers"].append((MODEL_WAIT, b"%.3f" % known.model_wait_s))
                if known.answer is not None and (version := known.answer.weight_version):
                    message["headers"].append((WEIGHT_VERSION, version.encode("ascii")))
                if known.is_metered:
                    message["headers"] += known.tenant.headers()
            await send(message)

        self.num_running += 1
        if self._recent is not None:
            self._recent.begin(known, scope["path"])
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            status = 499
        finally:
            self.num_running -= 1
            seconds = time.monotonic() - start
            if self._metrics is not None and not scope.get("state", {}).get(FORWARDED):
                route = scope.get("route")
                self._metrics.record(scope["method"], None if route is None else route.path, status, seconds)
            if self._recent is not None:
                self._recent.end(known, status, start + seconds)
            if self._tracing is not None and known.is_metered:
                self._tracing.record(_ended(scope, known, status, start + seconds))
            if self._is_logged and scope["path"] not in self._quiet_paths:
                _log_access(scope, known, status, seconds)


def _log_access(scope: Scope, known: RequestScope, status: int, seconds: float) -> None:
    """The line of a request that has ended: the same facts as text and, in JSON lines, one by one."""
    line = f"{scope['method']} {_logged_path(scope)} {status} {seconds:.3f} s"
    facts: dict[str, object] = {
        "method": scope["method"], "path": _logged_path(scope), "status": status, "seconds": round(seconds, 6),
        "id": known.request_id,
    }  # fmt: skip
    if scope.get("client"):
        facts["client"] = scope["client"][0]
    if known.is_metered:
        facts["tenant"] = known.tenant.name
    if (answer := known.answer) is not None:
        if not answer.answer_id.endswith(known.request_id):
            facts["x_request_id"] = known.request_id
        facts["id"] = answer.answer_id
        facts |= {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_new_tokens}
    told = " ".join(f"{name}={value}" for name, value in list(facts.items())[4:] if value != "")
    access_logger.info("%s %s", line, told, extra={"facts": facts})


def _ended(scope: Scope, known: RequestScope, status: int, end_s: float) -> EndedRequest:
    """The facts of a finished request."""
    parent = {name: value.decode("latin-1") for name in TRACE_HEADERS if (value := header(scope, name.encode()))}
    received_ns = time.time_ns() - round(1e9 * (time.monotonic() - known.received_s))
    tenant, answer = known.tenant.name, known.answer
    if answer is None:
        receipt = make_receipt(known.received_s, RequestStateStats(), end_s)
        return EndedRequest(parent, scope["path"], status, received_ns, receipt, tenant=tenant)
    return EndedRequest(
        parent, scope["path"], status, received_ns, answer.receipt(end_s), model=answer.model, tenant=tenant,
        request_id=answer.answer_id, num_prompts=answer.num_prompts, num_prompt_tokens=answer.num_prompt_tokens,
        params=answer.params,
    )  # fmt: skip


class AuthMiddleware:
    """Refuses requests with too large a head, without a valid key, or where there are none of foreign web pages; names
    the tenant of the others.
    """

    def __init__(
        self, app: ASGIApp, *, tenants: Tenants, limits: LimitsConfig, metrics: ServerMetrics, origins: OriginRules
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._metrics = metrics
        self._origins = origins
        self._max_header_bytes = limits.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            self._metrics.record_refusal(refusal.reason, "")
            response = scope_of(scope).error_response(refusal)
            if refusal.kind is BAD_REQUEST:
                response.headers["connection"] = "close"  # where its body ends is not certain
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._max_header_bytes:
            return ApiError(HEADERS_TOO_LARGE, f"the request headers are larger than {self._max_header_bytes} bytes")
        known = scope_of(scope)
        known.tenant = self._tenants.anonymous
        names = {name for name, _ in scope["headers"]}
        if b"content-length" in names and b"transfer-encoding" in names:  # a proxy in front may have read another one
            return ApiError(BAD_REQUEST, "send content-length or transfer-encoding, not both")
        if is_open(scope):
            return None
        if not self._tenants.needs_key:
            return self._origins.refusal(scope)
        owner = self._tenants.find(_authorization(scope))
        if owner is None:
            return ApiError(
                UNAUTHORIZED, "a valid API key is required: send Authorization: Bearer KEY, or X-Api-Key: KEY"
            )
        known.tenant, known.key = owner
        return None


class ErrorMiddleware:
    """Answers what no route foresaw with a plain 500 of the catalogue, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_started = False

        async def watched(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGoneError:
            raise
        except Exception as error:
            if scope["type"] != "http" or is_started:
                raise
            await scope_of(scope).error_response(api_error_of(error))(scope, receive, send)


def _logged_path(scope: Scope) -> str:
    """The path as it was sent, which holds no line break and no control character."""
    return bytes(scope.get("raw_path") or b"")[:MAX_LOGGED_CHARS].decode("ascii", "backslashreplace")


def _authorization(scope: Scope) -> bytes:
    """The Authorization header; where there is none, what it would be with the key of X-Api-Key."""
    given = header(scope, b"authorization")
    return b"Bearer " + (header(scope, b"x-api-key") or b"") if given is None else given


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header, by its lower-case name."""
    return next((value for one, value in scope["headers"] if one == name), None)
