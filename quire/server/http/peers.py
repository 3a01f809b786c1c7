"""Peers: what a server asks of the other front ends on its port. Implemented by `server.front_ends`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.metrics.family_sums import Family
from quire.server.http.recent_requests import RequestTimeline

FORWARDED = "is_forwarded"
"""In the state of a request's scope: another front end has sent it here, and counts it."""

Route = Callable[[Request], Awaitable[Response]]
ResponseKey = tuple[str, str]


class Peers(Protocol):
    """The other front ends of a server."""

    async def families(self, own: Collector) -> list[Family]:
        """What all front ends and the owner have counted; `own` is this one's part."""

    async def requests(self) -> list[RequestTimeline]:
        """The latest requests of the others."""

    async def write_usage(self) -> None:
        """Have the others write what they have counted to the usage ledger."""

    async def claim(self, key: ResponseKey) -> bool:
        """Hold the id of a response, by tenant and id, until its `release`; False = another front end does."""

    def release(self, key: ResponseKey, *, is_made: bool) -> None:
        """Others may have it; with `is_made` the response was made here in the background."""

    def where_made(self, route: Route, is_here: Callable[[ResponseKey], bool]) -> Route:
        """`route`, a request to which is about the response of its path, answered where that is made."""
