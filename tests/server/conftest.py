"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with default settings on the scripted engine, shared by a file's tests."""
    with RunningServer(ScriptedEngine()) as running:
        yield running
