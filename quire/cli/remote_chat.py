"""The model of a conversation on a server, over its `/v1/chat/completions`, with no library but Python's own.

Used by `quire chat --url`. No state.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from quire.cli.conversation import Call, Reply
from quire.cli.sampling import FLAGS
from quire.cli.streaming import AnswerTimes
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.errors import ConfigError, QuireClientError

TIMEOUT_S = 600.0
MAX_ERROR_BYTES = 1 << 16


def remote_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, as fields of a request."""
    return {name: getattr(args, name) for name in (*FLAGS, "seed", "stop", "ignore_eos") if name in args}


class RemoteModel:
    """Asks a server.

    Args:
        url: with or without /v1.
        api_key: None = none.
        parameters: further fields of every request.
        model: one of the server's; None = its first.

    Attributes:
        name: of the model.

    Raises:
        ConfigError: the address is not valid, no server responds there, or it does not have the model.
    """

    def __init__(self, url: str, api_key: str | None, parameters: dict[str, Any], model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url {url!r} is not a valid address", hint="for example http://127.0.0.1:8000/v1", field="url"
            )
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json", "connection": "close"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._parameters = parameters
        with self._ask("GET", "/models") as response:
            names = [str(one["id"]) for one in json.loads(response.read())["data"]]
        if model is not None and model not in names:
            raise ConfigError(
                f"the server does not have the model {model!r}", hint=f"it has {', '.join(names)}", field="model"
            )
        self.name = model or names[0]

    def reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Reply:
        """As `ChatModel.reply`."""
        body = {
            **self._parameters, "model": self.name, "messages": messages, "stream": True,
            "stream_options": {"include_usage": True}, **({"tools": tools} if tools else {}),
        }  # fmt: skip
        start, times, text, num_events = time.perf_counter(), AnswerTimes(), "", 0
        calls: list[list[str]] = []
        response = self._ask("POST", "/chat/completions", json.dumps(body).encode())
        with response, DeferredInterrupt() as interrupt:
            for event in _events(response):
                if "error" in event:
                    raise QuireClientError(str(event["error"].get("message")))
                for choice in event["choices"]:
                    delta = choice["delta"].get("content") or ""
                    parts = choice["delta"].get("tool_calls") or []
                    text += delta
                    print(delta, end="", flush=True)
                    for part in parts:
                        _add(calls, part["function"])
                    times.finish_reason = choice["finish_reason"] or times.finish_reason
                    if delta or parts:
                        num_events += 1
                        times.last_token_s = time.perf_counter() - start
                        times.first_token_s = times.first_token_s or times.last_token_s
                times.num_tokens = (event.get("usage") or {}).get("completion_tokens", num_events)
                if interrupt.is_pending:
                    times.finish_reason = "abort"
                    break
        if text or not calls:
            print(flush=True)
        return Reply(text, [Call(*one) for one in calls], times)

    def set_parameter(self, name: str, value: Any) -> None:
        """As `ChatModel.set_parameter`; the server checks it."""
        self._parameters = {**self._parameters, name: value}

    def _ask(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no server responds at {self._parts.geturl()}: {error}", hint="start one: quire serve", field="url"
            ) from None
        if response.status != 200:
            with response:
                raise QuireClientError(_message(response), hint=f"the server answered {response.status}")
        return response


def _add(calls: list[list[str]], function: dict[str, Any]) -> None:
    """A part of a call: its name, or more of the last one's arguments."""
    if function.get("name"):
        calls.append([function["name"], ""])
    if calls:
        calls[-1][1] += function.get("arguments") or ""


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
