"""In which form an error is written: that of the API whose path was asked. OpenAI's unless a form says otherwise.

The application gives the middleware its forms; the middleware puts a request's into its `RequestScope`. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from quire.server.http.access import own_path
from quire.server.http.errors import ApiError


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How one API writes its errors.

    Attributes:
        path: of its routes, or where they begin.
        content: makes the JSON object of an error and the request's id.
        id_header: header with the request's id, beside X-Request-Id; None = none.
    """

    path: str
    content: Callable[[ApiError, str], bytes]
    id_header: bytes | None = None


def form_of(scope: Scope, forms: Sequence[ErrorForm]) -> ErrorForm | None:
    """The form for errors of a request; None = OpenAI's."""
    path = own_path(scope)
    return next((form for form in forms if path == form.path or path.startswith(f"{form.path}/")), None)
