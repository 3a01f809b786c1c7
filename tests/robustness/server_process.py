"""`quire serve` as a child process of a test, and what the system knows of it: memory, open files, children.

Each server has a directory of its own for temporary files, so that what it leaves behind is seen.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
FRONT_END = "quire.server.front_ends.process"
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+); ready in")


class ServerProcess:
    """A server on a free port; ready when this returns.

    Args:
        flags: of `quire serve`.
        model: None = `flags` name the models.
        environment: variables beside those of this process.

    Attributes:
        pid: of the front-end.
        port: where it listens.
    """

    def __init__(self, *flags: str, model: str | None = "leaf", environment: Mapping[str, str] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="q")
        root = Path(self._directory.name)
        self._log_path, self._temporary = root / "log", root / "t"
        self._temporary.mkdir()
        named = [] if model is None else [model]
        if model is not None and not any(flag.startswith("--spec") for flag in flags):
            named += ["--speculative-config", "off"]  # streams that are to be disturbed must last
        command = [sys.executable, "-m", "quire", "serve", *named, "--port", "0", "--num-threads", "1", *flags]
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=log,
                env={**os.environ, "TMPDIR": str(self._temporary), **(environment or {})},
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log_path.read_text(errors="replace")

    @property
    def core_pid(self) -> int:
        """Process id of its engine core; waits until there is one."""
        wait_until(lambda: len(children_of(self.pid)) == 1, "the server has one child")
        return children_of(self.pid)[0]

    @property
    def leftovers(self) -> list[str]:
        """The engine's temporary files that are there."""
        return [path.name for path in self._temporary.glob("quire-*")]

    def send(self, number: int) -> None:
        """Send a signal to the front-end."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait(timeout_s)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, whatever it does, and remove its files; harmless when repeated."""
        if self._process.poll() is None:
            self.send(number)
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := LISTENING.search(self.log)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.02)
        return int(found[1])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> float:
    """Wait until `condition()` holds; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, of all of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(one) for one in (task / "children").read_text().split()]
        except OSError:  # the thread has ended
            continue
    return sorted(found)


def front_ends_of(pid: int) -> list[int]:
    """Those of a process's children that are front ends."""
    return [one for one in children_of(pid) if FRONT_END in _command_of(one)]


def cores_of(pid: int) -> list[int]:
    """Those of a process's children that are not."""
    return [one for one in children_of(pid) if FRONT_END not in _command_of(one)]


def server_of_connections(port: int, pids: Sequence[int]) -> dict[int, int]:
    """Client's port of each connection to a server's port -> which of its processes has it."""
    inodes: dict[str, int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes[target[8:-1]] = pid
    found: dict[int, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[9] in inodes:
            found[int(fields[2].rpartition(":")[2], 16)] = inodes[fields[9]]
    return found


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def num_open_files(pid: int) -> int:
    """File descriptors that a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own and not a file's."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])
