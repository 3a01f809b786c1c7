"""Parameters of a query, checked by name. Called by routes. No state."""

from __future__ import annotations

from starlette.requests import Request

from quire.errors import ValidationError, unknown_name
from quire.utils.checks import shown


def check_query(request: Request, *names: str) -> None:
    """Refuse parameters other than `names`: a slip would do something else than what was asked for.

    Raises:
        ValidationError: the parameter is named.
    """
    for name in request.query_params:
        if name in names:
            continue
        if not names:
            raise ValidationError(f"unknown parameter {shown(name)}", hint="leave it out", field=name)
        raise unknown_name("parameter", name, names, ValidationError)
