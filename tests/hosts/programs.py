"""What the checks of hosts have in common: free ports, environments of their own, programs that run for a while."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.robustness.server_process import children_of, wait_until

START_TIMEOUT_S = 180.0
BUILD = Path("build") / "hosts"


def free_port() -> int:
    """A port of the loopback that no program has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def free_low_port() -> int:
    """One below 32768: Dynamo reads the port of its metrics as 16 bits with a sign."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            port: int = one.getsockname()[1]
            return port


def environment(name: str, *installs: Sequence[str]) -> Path:
    """The Python of an environment in `build/hosts` that has `installs` and, behind them, what this one has."""
    folder = BUILD / name
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for arguments in installs:
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *arguments], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "behind.pth").write_text("\n".join([*ours, str(Path.cwd())]) + "\n")
        done.touch()
    return python.absolute()


class Program:
    """A child process with a log; ends with this.

    Args:
        is_ready: called until it is true.
    """

    def __init__(
        self, command: Sequence[str], is_ready: Callable[[], object] = lambda: True, env: dict[str, str] | None = None
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.pid = self.process.pid

        def ready() -> object:
            if self.process.poll() is not None:
                raise AssertionError(f"{command[0]} has ended with {self.process.returncode}:\n{self.log[-4000:]}")
            return is_ready()

        try:
            wait_until(ready, f"{command[0]} is ready", START_TIMEOUT_S)
        except BaseException:
            print(self.log[-4000:], file=sys.stderr)
            self.stop(signal.SIGKILL)
            raise

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """What it has written."""
        return Path(self._log.name).read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """End it; its exit status. Harmless when repeated."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def core_of(pid: int) -> int:
    """The engine core's process below `pid`, once there is one."""
    found: list[int] = []

    def find() -> bool:
        below = children_of(pid)
        for child in below:
            below += children_of(child)
        found[:] = [child for child in below if b"core_proc" in _command(child)]
        return bool(found)

    wait_until(find, "there is an engine core")
    return found[0]


def answers(url: str) -> bool:
    """Whether a server answers its health check."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels; NaN when it is not there."""
    lines = [
        line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else float("nan")


def stream_text(url: str, path: str, body: dict[str, Any], on_chunk: Callable[[int], None] = lambda count: None) -> str:
    """The text of a streamed answer; `on_chunk` is called with the number of each chunk."""
    text, count = "", 0
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "choices" in chunk, chunk
            for choice in chunk["choices"]:
                text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            count += 1
            on_chunk(count)
    return text


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
