"""A conversation with a server, over its `/v1/chat/completions`, with no library but Python's own.

Used by `quire chat --url`. Owns the conversation.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.entrypoints.cli.sampling import FLAGS
from quire.entrypoints.cli.streaming import AnswerTimes
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.errors import ConfigError, QuireClientError

TIMEOUT_S = 600.0
MAX_ERROR_BYTES = 1 << 16


def remote_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, as fields of a request."""
    return {name: getattr(args, name) for name in (*FLAGS, "seed", "stop", "ignore_eos") if name in args}


class RemoteChat:
    """Talks to a server.

    Args:
        url: with or without /v1.
        api_key: None = none.
        parameters: further fields of every request.
        system_prompt: first message of the conversation; None = none.

    Attributes:
        model: the first that the server has.

    Raises:
        ConfigError: the address is none, or nobody answers there.
    """

    def __init__(self, url: str, api_key: str | None, parameters: dict[str, Any], system_prompt: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is no address", hint="for example http://127.0.0.1:8000/v1", field="url")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json", "connection": "close"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._parameters = parameters
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []
        with self._ask("GET", "/models") as response:
            self.model = str(json.loads(response.read())["data"][0]["id"])
        self.set_system_prompt(system_prompt)

    def set_system_prompt(self, text: str | None) -> None:
        """Begin anew with `text` as the system prompt."""
        self._system = [{"role": "system", "content": text}] if text else []
        self._turns = []

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self._turns = []

    def answer(self, message: str) -> AnswerTimes:
        """Write the answer to `message` to stdout as it comes; Ctrl-C ends the answer, not the program."""
        turns = [*self._turns, {"role": "user", "content": message}]
        body = {
            **self._parameters, "model": self.model, "messages": [*self._system, *turns], "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        start, times, text = time.perf_counter(), AnswerTimes(), ""
        response = self._ask("POST", "/chat/completions", json.dumps(body).encode())
        with response, DeferredInterrupt() as interrupt:
            for event in _events(response):
                if "error" in event:
                    raise QuireClientError(str(event["error"].get("message")))
                for choice in event["choices"]:
                    delta = choice["delta"].get("content") or ""
                    text += delta
                    print(delta, end="", flush=True)
                    times.finish_reason = choice["finish_reason"] or times.finish_reason
                    if delta:
                        times.last_token_s = time.perf_counter() - start
                        times.first_token_s = times.first_token_s or times.last_token_s
                times.num_tokens = (event.get("usage") or {}).get("completion_tokens", times.num_tokens)
                if interrupt.is_pending:
                    times.finish_reason = "abort"
                    break
        print(flush=True)
        self._turns = [*turns, {"role": "assistant", "content": text}]
        return times

    def _ask(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no server answers at {self._parts.geturl()}: {error}", hint="start one: quire serve", field="url"
            ) from None
        if response.status != 200:
            with response:
                raise QuireClientError(_message(response), hint=f"the server answered {response.status}")
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _message(response: http.client.HTTPResponse) -> str:
    content = response.read(MAX_ERROR_BYTES)
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason
