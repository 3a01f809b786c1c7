"""Anthropic's form of errors. No state."""

from __future__ import annotations

import msgspec

from quire.server.http.error_forms import ErrorForm
from quire.server.http.errors import ApiError

CLIENT_ERROR, SERVER_ERROR = "invalid_request_error", "api_error"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> type, where it is neither `CLIENT_ERROR` nor `SERVER_ERROR`."""


def error_content(error: ApiError, request_id: str) -> bytes:
    """The JSON object of an error."""
    status = error.kind.status
    kind = TYPES.get(status, SERVER_ERROR if status >= 500 else CLIENT_ERROR)
    told = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    return msgspec.json.encode(told)


MESSAGES_ERRORS = ErrorForm("/v1/messages", error_content, id_header=b"request-id")
