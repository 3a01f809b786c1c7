"""The server as a service of systemd: what it reports, and the unit file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire.server.http.service_manager import ServiceManager
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "quire.service"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The socket of a service manager that started this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield end


def reports(manager: socket.socket, until: str) -> list[str]:
    """Lines that were reported, in order, up to the one that begins with `until`."""
    lines: list[str] = []
    while not any(line.startswith(until) for line in lines):
        lines += manager.recv(4096).decode().split("\n")
    return lines


def test_a_server_reports_that_it_is_ready_alive_and_draining(manager: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    with RunningServer(ScriptedEngine(), shutdown_timeout=1) as server:
        ready = reports(manager, "READY=1")
        assert f"STATUS=listening on {server.url}" in reports(manager, "WATCHDOG=1") + ready
        reports(manager, "WATCHDOG=1")
        server.server.begin_drain()
        stopping = reports(manager, "EXTEND_TIMEOUT_USEC=")
    assert "STOPPING=1" in stopping and "STATUS=draining 0 requests" in stopping
    assert int(stopping[-1].partition("=")[2]) > 1_000_000, "microseconds"


def test_a_watchdog_of_another_process_is_not_answered(manager: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getppid()))
    found = ServiceManager.from_environment()
    assert found is not None and found.watchdog_s == 0


def test_without_a_manager_nothing_is_reported(monkeypatch: pytest.MonkeyPatch):
    for address in ("", "relative", "@", "/"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert ServiceManager.from_environment() is None


def test_a_manager_that_is_gone_stops_nobody(tmp_path: Path):
    ServiceManager(str(tmp_path / "gone")).ready("listening")
    ServiceManager("@quire-test-of-nobody").ready("listening")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/quire/bin/quire", sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert verified.returncode == 0 and not verified.stderr, verified.stderr
