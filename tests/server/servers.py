"""A server in a thread of this process, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import openai

from quire.config.server import (
    ApiConfig,
    HttpConfig,
    LimitsConfig,
    ResponsesConfig,
    ServerConfig,
    TracingConfig,
    UsageConfig,
)
from quire.server import launcher
from quire.server.launcher import DrainingServer, make_server

launcher.NOTICE_S = 0.0  # no load balancer is to learn of the ends of these servers, of which there are hundreds


def server_config(**settings: Any) -> ServerConfig:
    """Settings by field name, whatever their section."""
    parts: dict[str, Any] = {}
    sections = (
        ("http", HttpConfig), ("api", ApiConfig), ("limits", LimitsConfig), ("tracing", TracingConfig),
        ("responses", ResponsesConfig), ("usage", UsageConfig),
    )  # fmt: skip
    for section, config in sections:
        names = [name for name in settings if name in config.__dataclass_fields__]
        parts[section] = config(**{name: settings.pop(name) for name in names})
    assert not settings, settings
    return ServerConfig(**parts)


class RunningServer:
    """Listens while it is entered.

    Attributes:
        url: without a path.
        engine: as given.
    """

    def __init__(
        self, engine: Any, *, is_given_socket: bool = True, server: DrainingServer | None = None, **settings: Any
    ) -> None:
        self.engine = engine
        self.server = server or make_server(engine, server_config(**{"port": 0, **settings}))
        self.server.main_loop = self._look  # type: ignore[method-assign]
        self.server.show_start([("settings", 0.25)], [("model", 0.5)])
        self._is_given_socket = is_given_socket
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            threading.Event().wait(0.005)
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"
        self.listener.close()

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same, for an event loop."""
        return openai.AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    @property
    def state(self) -> Any:
        """The server's state."""
        return self.server._state

    def give_up(self, path: str, body: dict[str, Any], when: Callable[[], object], authorization: str = "") -> None:
        """Ask as a client that waits for its answer until `when()` holds, and then goes away."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: {authorization}\r\n" if authorization else ""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            self.wait_until(when)

    def wait_until(self, condition: Any) -> None:
        """Wait until `condition()` holds, at most a minute."""
        for _ in range(12000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("it never came to be")

    async def _look(self) -> None:
        """As the server's own loop, ten times as often: it is the end of most tests that waits for it."""
        counter = 0
        while not await self.server.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.01)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listener] if self._is_given_socket else None))
