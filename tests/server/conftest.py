"""Fixtures of the server's tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import httpx
import pytest

from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

# A loaded machine may take longer than the five seconds that httpx waits where a call names no time of its own.
_default = inspect.signature(httpx.get).parameters["timeout"].default
_default.connect = _default.read = _default.write = _default.pool = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with default settings on the scripted engine, shared by a file's tests."""
    with RunningServer(ScriptedEngine()) as running:
        yield running
