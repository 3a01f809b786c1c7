"""What clients receive when something is wrong: a fixed catalogue, so that no internal text gets out.

Raised as `ApiError` anywhere in the server; other exceptions become one in `api_error_of`. No state.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from quire.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineGenerateError,
    EngineRestartingError,
    EngineSleepingError,
    QueueTimeoutError,
    QuireClientError,
)
from quire.logger import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 1000
ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
# Of files; places in the JSON of a request begin with #.
PATH = re.compile(r"(?<![\w<#])/(?:[\w.@+-]+/)+[\w.@+-]*")

REQUEST_FIELDS = {"extra_args": "vllm_xargs"}
"""What requests call fields that have another name inside."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A row of the catalogue.

    Attributes:
        status: of HTTP.
        type: `type` of the error object.
        reason: label of the metric that counts refusals; "" = not a refusal.
        code: `code` of the error object; None = the status.
    """

    status: int
    type: str
    reason: str
    code: str | None = None


BAD_REQUEST = ErrorKind(400, "BadRequestError", "bad_request")
TOO_LONG = ErrorKind(400, "BadRequestError", "bad_request", "context_length_exceeded")
UNAUTHORIZED = ErrorKind(401, "AuthenticationError", "unauthorized")
FORBIDDEN = ErrorKind(403, "PermissionDeniedError", "forbidden")
NOT_FOUND = ErrorKind(404, "NotFoundError", "not_found")
METHOD_NOT_ALLOWED = ErrorKind(405, "MethodNotAllowedError", "method_not_allowed")
TIMEOUT = ErrorKind(408, "RequestTimeoutError", "body_timeout")
TOO_LARGE = ErrorKind(413, "RequestTooLargeError", "body_too_large")
UNSUPPORTED_MEDIA = ErrorKind(415, "UnsupportedMediaTypeError", "unsupported_media")
HEADERS_TOO_LARGE = ErrorKind(431, "RequestTooLargeError", "head_too_large")
CONFLICT = ErrorKind(409, "Conflict", "conflict")
OVERLOADED = ErrorKind(429, "RateLimitError", "overloaded")
LIMITED_REQUESTS = ErrorKind(429, "requests", "requests_per_minute", "rate_limit_exceeded")
LIMITED_TOKENS = ErrorKind(429, "tokens", "tokens_per_minute", "rate_limit_exceeded")
INTERNAL = ErrorKind(500, "InternalServerError", "")
UNAVAILABLE = ErrorKind(503, "ServiceUnavailableError", "engine_dead")
STORE_FAILED = ErrorKind(503, "ServiceUnavailableError", "response_store")
QUEUE_TIMEOUT = ErrorKind(503, "ServiceUnavailableError", "queue_timeout", "queue_timeout")

ENGINE_DEAD = "the engine has stopped; restart the server"
ENGINE_SLEEPING = "the engine is asleep; wake it up (POST /wake_up)"
ENGINE_RESTARTING = "the engine is restarting; running requests continue, new ones wait"
WAITED_TOO_LONG = "the request was not started within its queue_timeout; nothing was computed"
REQUEST_FAILED = "the request failed inside the engine; other requests are not affected"
INTERNAL_MESSAGE = "internal error; see the server's log under this request's X-Request-Id"


class ApiError(Exception):
    """An answer that is an error.

    Args:
        kind: status and type.
        message: for the client; written by us, never the text of an unforeseen exception.
        param: the field it is about.
        retry_after_s: seconds after which trying again is of use; None = it is not.
        reason: label of the metric that counts refusals, when it is not that of `kind`.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.reason = kind.reason if reason is None else reason

    def content(self) -> bytes:
        """The JSON object, as `{"error": {...}}`."""
        error = {
            "message": self.message, "type": self.kind.type, "param": self.param,
            "code": self.kind.code or self.kind.status,
        }  # fmt: skip
        return msgspec.json.encode({"error": error})

    def response(self, content: bytes | None = None) -> Response:
        """The HTTP response.

        Args:
            content: as another API than OpenAI's writes it.
        """
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
            if self.kind.code is not None:  # exact to the millisecond, for clients that know it
                headers["retry-after-ms"] = str(math.ceil(round(1e3 * self.retry_after_s, 3)))
        if self.kind.status == UNAUTHORIZED.status:
            headers["www-authenticate"] = "Bearer"
        return Response(content or self.content(), self.kind.status, headers, media_type="application/json")


class ClientGoneError(Exception):
    """The client closed the connection."""


def api_error_of(error: BaseException) -> ApiError:
    """The response to `error`; what must stay inside is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuireClientError):
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        kind = TOO_LONG if isinstance(error, ContextLengthError) else BAD_REQUEST
        return ApiError(kind, sanitised(text), param=REQUEST_FIELDS.get(error.field or "", error.field))
    if isinstance(error, EngineRestartingError):
        return ApiError(UNAVAILABLE, ENGINE_RESTARTING, retry_after_s=1)
    if isinstance(error, EngineSleepingError):
        return ApiError(UNAVAILABLE, ENGINE_SLEEPING, retry_after_s=5, reason="paused")
    if isinstance(error, EngineDeadError):
        return ApiError(UNAVAILABLE, ENGINE_DEAD, retry_after_s=5)
    if isinstance(error, QueueTimeoutError):
        return ApiError(QUEUE_TIMEOUT, WAITED_TOO_LONG, param="queue_timeout", retry_after_s=1)
    if isinstance(error, EngineGenerateError):
        logger.error("%s", error)
        return ApiError(INTERNAL, REQUEST_FAILED)
    logger.error("internal error", exc_info=error)
    return ApiError(INTERNAL, INTERNAL_MESSAGE)


def sanitised(text: str) -> str:
    """`text` without addresses and file paths, and not too long."""
    return PATH.sub("<path>", ADDRESS.sub("<address>", text[: 2 * MAX_MESSAGE_CHARS]))[:MAX_MESSAGE_CHARS]
