"""GET from a running server, for commands that show what it says."""

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
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--url {url!r} is not a valid address", hint="for example http://127.0.0.1:8000", field="url"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        connection.request("GET", parts.path.rstrip("/").removesuffix("/v1") + path, headers=headers)
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
