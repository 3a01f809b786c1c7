"""The Responses API's form of errors: OpenAI's, with its own type, and the fields as they are called here. No state."""

from __future__ import annotations

from dataclasses import replace

from quire.server.api.responses.translation import FIELD_NAMES
from quire.server.http.error_forms import ErrorForm
from quire.server.http.errors import ApiError

INVALID_REQUEST = "invalid_request_error"
STATUSES = frozenset((400, 404))


def error_content(error: ApiError, request_id: str) -> bytes:
    """The JSON object of an error."""
    kind = replace(error.kind, type=INVALID_REQUEST) if error.kind.status in STATUSES else error.kind
    return ApiError(kind, error.message, param=field_of(error)).content()


def field_of(error: ApiError) -> str | None:
    """The field that an error is about, as a response calls it."""
    if error.param is None:
        return None
    return FIELD_NAMES.get(error.param.partition("[")[0], error.param)


RESPONSES_ERRORS = ErrorForm("/v1/responses", error_content)
