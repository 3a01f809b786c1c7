"""RequestScope: what middleware and routes record of one HTTP request, for each other to read.

Made by `RequestLog` before any other part sees the request; `scope_of` returns it. Lives as long as the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from quire.core.sampling_params import SamplingParams
from quire.server.http.body_budget import BodyLease
from quire.server.http.error_forms import ErrorForm
from quire.server.http.errors import ApiError
from quire.server.http.tenants import Tenant
from quire.server.http.timing_breakdown import TimingBreakdown

KEY = "request_scope"


class AnswerRecord(Protocol):
    """What the access log and traces say of an answer; the writer of each answer keeps one."""

    model: str

    @property
    def answer_id(self) -> str:
        """The id that the client was given."""

    @property
    def weight_version(self) -> str:
        """Of the weights that compute it; "" = those of the server's start."""

    @property
    def params(self) -> SamplingParams:
        """Of each of its prompts."""

    @property
    def num_prompts(self) -> int:
        """Prompts that it answers."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""

    @property
    def num_new_tokens(self) -> int:
        """Of all prompts, so far."""

    def receipt(self, now_s: float | None = None) -> TimingBreakdown:
        """Where the request's time went until `now_s` (monotonic clock), by default now."""


@dataclass(slots=True)
class RequestScope:
    """One HTTP request.

    Attributes:
        request_id: the client's own X-Request-Id where it is usable, else random.
        received_s: when it came, monotonic clock.
        error_form: how its errors are written; None = as OpenAI does.
        has_unusable_id: the client's X-Request-Id was not used; the route names it.
        tenant: whose it is; set by `Gate`, which refuses requests before that only for their size.
        key: fingerprint of its API key; "" = it has none.
        is_metered: it counts against the limits of `tenant`: answers have its rate headers, and traces a span.
        body: bytes of its body that are held; None before it is received.
        answer: None until there is one.
        model_wait_s: seconds that it waited for its model to be loaded.
    """

    request_id: str
    received_s: float
    error_form: ErrorForm | None = None
    has_unusable_id: bool = False
    tenant: Tenant = field(init=False)
    key: str = ""
    is_metered: bool = False
    body: BodyLease | None = None
    answer: AnswerRecord | None = None
    model_wait_s: float = 0.0

    def error_response(self, error: ApiError) -> Response:
        """The answer to a request that is `error`."""
        return error.response(None if self.error_form is None else self.error_form.content(error, self.request_id))


def begin(scope: Scope, made: RequestScope) -> None:
    """Keep `made` with the ASGI scope of its request."""
    scope.setdefault("state", {})[KEY] = made


def scope_of(request: HTTPConnection | Scope) -> RequestScope:
    """What is recorded of a request, by the request or its ASGI scope."""
    found: RequestScope = request["state"][KEY]  # a request is a mapping to its scope
    return found
