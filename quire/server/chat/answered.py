"""answered: every exception of a route becomes a response of the catalogue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from quire.server.chat.reading import release
from quire.server.http.access import is_probe
from quire.server.http.errors import ApiError, ClientGoneError, api_error_of
from quire.server.http.request_scope import scope_of
from quire.server.http.tenants import Tenants

Route = Callable[[Request], Awaitable[Response]]
NO_CLIENT = 499


class RefusalMetrics(Protocol):
    """Counts refusals."""

    def record_refusal(self, reason: str, tenant: str) -> None:
        """As `ServerMetrics.record_refusal`."""


class RefusalRecord(Protocol):
    """Where refusals are counted: the state of a model, or the parts of a server."""

    @property
    def metrics(self) -> RefusalMetrics:
        """Counts them."""

    @property
    def tenants(self) -> Tenants:
        """Whose they may be."""


def answered(route: Route, state: RefusalRecord) -> Route:
    """`route`, with every exception answered from the catalogue, and refusals counted."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except ClientGoneError:
            return Response(status_code=NO_CLIENT)
        except Exception as error:  # the catalogue decides what the client receives, and logs the rest
            return refused(request, api_error_of(error), state)
        finally:
            release(request)

    answer.__name__, answer.__doc__ = route.__name__, route.__doc__
    return answer


def refused(request: Request, error: ApiError, state: RefusalRecord) -> Response:
    """The answer to a request that is refused, which is counted; a probe that learns how the server is, is not."""
    known = scope_of(request)
    if error.reason and not is_probe(request.scope):
        tenant = known.tenant
        state.metrics.record_refusal(error.reason, "" if tenant is state.tenants.anonymous else tenant.name)
    return known.error_response(error)
