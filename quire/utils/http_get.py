"""GET from a running server, and POST to it, for commands that show what it says."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from quire.errors import ConfigError, QuireClientError

TIMEOUT_S = 30.0
MAX_BYTES = 64 << 20


def get(url: str, path: str, api_key: str | None) -> bytes:
    """The body of an answer with status 200.

    Args:
        url: of the server; a path in it is put before `path`, /v1 at its end left out.

    Raises:
        ConfigError: the address is not valid, or no server responds there.
        QuireClientError: the server refuses; says why.
    """
    return _ask("GET", url, path, api_key, None, TIMEOUT_S)


def post(url: str, path: str, api_key: str | None, content: object, timeout_s: float) -> bytes:
    """As `get`, with a JSON body; waits so long for the answer."""
    return _ask("POST", url, path, api_key, json.dumps(content).encode(), timeout_s)


def _ask(method: str, url: str, path: str, api_key: str | None, body: bytes | None, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--url {url!r} is not a valid address", hint="for example http://127.0.0.1:8000", field="url"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, body, headers)
        response = connection.getresponse()
        content = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"no server responds at {parts.geturl()}: {error}", hint="start one: quire serve", field="url"
        ) from None
    finally:
        connection.close()
    if response.status != 200:
        raise QuireClientError(_reason(content, response.reason), hint=f"the server answered {response.status}")
    return content


def _reason(content: bytes, reason: str) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reason
