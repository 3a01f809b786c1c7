"""PageFiles: the files of the page, in memory, with the headers that keep it to itself.

Made by `server.app`. Everything that the page loads and asks for is of its own origin: the content security policy says
so to browsers, and allows no inline script.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quire.server.chat.answered import Route
from quire.server.http.errors import NOT_FOUND, ApiError

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cache-control": "no-cache", "vary": "accept",
}  # fmt: skip
INDEX = "index.html"


class PageFiles:
    """Serves the page."""

    def __init__(self) -> None:
        self._files = {
            path.name: (path.read_bytes(), TYPES[path.suffix]) for path in sorted(STATIC.iterdir()) if path.is_file()
        }
        self._tags = {
            name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, (content, _) in self._files.items()
        }

    def root(self, otherwise: Route) -> Route:
        """The route of `/`: the page for browsers, `otherwise` for the programs that probe it."""

        async def root(request: Request) -> Response:
            """The page, for browsers; for other clients a line that says what listens here."""
            if "text/html" not in request.headers.get("accept", ""):
                return await otherwise(request)
            return self._answer(INDEX, request)

        return root

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        name = request.path_params["name"]
        if name not in self._files:
            raise ApiError(NOT_FOUND, "the page has no such file")
        return self._answer(name, request)

    def _answer(self, name: str, request: Request) -> Response:
        content, media_type = self._files[name]
        headers = {**HEADERS, "etag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)
