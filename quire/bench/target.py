"""The server under test: its address, and what it says before the first request. No state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.bench.connection import ConnectionPool, request_bytes
from quire.bench.load import run_on_loop
from quire.bench.records import Target
from quire.errors import ConfigError, QuireServerError

MODELS_TIMEOUT_S = 30.0
POLL_S = 0.5


def make_target(
    base_url: str,
    endpoint: str,
    *,
    headers: Mapping[str, str],
    api_key: str | None,
    checks_certificate: bool = True,
    flag: str = "--base-url",
) -> Target:
    """The target of an address, with or without /v1 at its end.

    Args:
        flag: that gave the address.

    Raises:
        ConfigError: the address, the endpoint or a header is none.
    """
    parts = urlsplit(base_url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ConfigError(
            f"{flag} {base_url!r} is not a valid address",
            hint="for example http://127.0.0.1:8000",
            field=flag.lstrip("-").replace("-", "_"),
        )
    if not endpoint.startswith("/") or not endpoint.endswith("/completions"):
        raise ConfigError(
            f"--endpoint {endpoint!r} is not supported",
            hint="/v1/completions or /v1/chat/completions",
            field="endpoint",
        )
    own = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    for name, value in {**headers, **own}.items():
        if not (name.isascii() and value.isprintable() and name.isprintable()) or set(name) & set(": "):
            raise ConfigError(f"the header {name!r} cannot be sent", hint="write --header NAME=VALUE", field="header")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(
        host=parts.hostname, port=port, path=prefix + endpoint,
        models_path=f"{prefix}/v1/models", is_tls=parts.scheme == "https", checks_certificate=checks_certificate,
        headers={**own, **{name.lower(): value for name, value in headers.items()}},
    )  # fmt: skip


def first_model(target: Target, wait_s: float = 0.0) -> str:
    """The first model that the server lists.

    Args:
        wait_s: seconds during which the server may still be starting.

    Raises:
        QuireServerError: no server responds there, or not with a list of models.
    """
    return run_on_loop(_first_model(target, wait_s))


async def _first_model(target: Target, wait_s: float) -> str:
    deadline = time.monotonic() + wait_s
    pool = ConnectionPool(target)
    try:
        while True:
            answer = await pool.ask(request_bytes(target, None, target.models_path), MODELS_TIMEOUT_S)
            if answer.failure is None or time.monotonic() >= deadline:
                break
            await asyncio.sleep(POLL_S)
    finally:
        pool.close()
    url = f"{target.host}:{target.port}{target.models_path}"
    if answer.failure is not None:
        raise QuireServerError(
            f"{url} does not respond: {answer.failure.kind}: {answer.failure.message}",
            hint="check --base-url and the API key (QUIRE_API_KEY), or give --ready-check-timeout-sec to wait for it",
        )
    try:
        content: Any = msgspec.json.decode(answer.body)
        return str(content["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise QuireServerError(f"{url} does not list a model", hint="pass one with --model") from None
