"""GET /v1/usage: what tenants used, by day, key and model. Operators see all, every other tenant itself."""

from __future__ import annotations

import asyncio
import sqlite3

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import unknown_name
from quire.server.chat.state import ServerParts
from quire.server.http.errors import FORBIDDEN, NOT_FOUND, UNAVAILABLE, ApiError
from quire.server.http.query import check_query
from quire.server.http.request_scope import scope_of
from quire.server.usage.forms import FORMATS, as_csv, as_json, day_of

PARAMETERS = ("since", "until", "tenant", "format")
CONTENT = {"json": "application/json", "csv": "text/csv; charset=utf-8"}


class UsageRoutes:
    """Reads the ledger."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    async def usage(self, request: Request) -> Response:
        """Tokens by day, tenant, key and model: ?since=, ?until= (days that are included), ?tenant=, ?format=."""
        ledger = self._parts.accounts.ledger
        if ledger is None:
            raise ApiError(NOT_FOUND, "usage is not recorded; start the server with --usage-ledger FILE")
        query, tenant = request.query_params, scope_of(request).tenant
        check_query(request, *PARAMETERS)
        form = query.get("format", "json")
        if form not in FORMATS:
            raise unknown_name("format", form, FORMATS, field="format")
        since = day_of("since", query.get("since", "0001-01-01"))
        until = day_of("until", query.get("until", "9999-12-31"))
        wanted = query.get("tenant")
        if not self._parts.tenants.may_see_all(tenant):
            if wanted not in (None, tenant.name):
                raise ApiError(FORBIDDEN, "the usage of other tenants needs operator rights", param="tenant")
            wanted = tenant.name
        if self._parts.peers is not None:
            await self._parts.peers.write_usage()
        try:
            rows = await asyncio.to_thread(ledger.rows, since, until, wanted)
        except sqlite3.Error:
            raise ApiError(UNAVAILABLE, "the usage ledger cannot be read now", retry_after_s=5) from None
        text = as_csv(rows) if form == "csv" else as_json(rows)
        return Response(text, headers={"content-type": CONTENT[form], "cache-control": "no-store"})
