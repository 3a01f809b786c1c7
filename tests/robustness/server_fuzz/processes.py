"""The server under attack as a process of its own, and what it holds on to. Owns that process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.robustness.server_fuzz.client import Progress

ROOT = Path(__file__).parents[3]
READY = re.compile(r"listening on http://127\.0\.0\.1:(\d+); ready in")
FLAGS = (
    "--port", "0", "--num-gpu-blocks-override", "512", "--num-threads", "1", "--timeout-keep-alive", "2",
    "--head-timeout", "3",
    "--body-timeout", "3",
)  # fmt: skip
START_S = 120.0  # of CPU time, and of wall time without any
RSS_BOUND_MIB, RSS_BOUND_SHARE, FILES_BOUND = 12.0, 0.03, 24
LEAST_SAMPLES = 120  # one a second; a shorter run touches memory for the first time until its end


class Served:
    """`quire serve leaf` while it is entered.

    Attributes:
        port: where it listens.
        log: what it wrote to stderr.
    """

    def __init__(self, directory: Path, *flags: str) -> None:
        self.log = directory / "server.log"
        command = [sys.executable, "-m", "quire", "serve", "leaf", *FLAGS, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("QUIRE_API_KEY", None)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        self.port = 0

    def __enter__(self) -> Served:
        progress = Progress(START_S)
        while (found := READY.search(self.log.read_text())) is None:
            assert self._process.poll() is None, self.log.read_text()
            used_s = sum(map(cpu_s, self.pids()))
            assert used_s < START_S and not progress.has_stopped(used_s), self.log.read_text()
            time.sleep(0.05)
        self.port = int(found[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def is_alive(self) -> bool:
        """True while the front end runs."""
        return self._process.poll() is None

    def pids(self) -> tuple[int, int]:
        """Front end and engine core."""
        children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        found = [int(pid) for file in children for pid in file.read_text().split()]
        sizes = {pid: rss_mib(pid) for pid in found if Path(f"/proc/{pid}/status").exists()}
        return self._process.pid, max(sizes, key=lambda pid: sizes[pid], default=self._process.pid)


def cpu_s(pid: int) -> float:
    """CPU time of a process; 0 = it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def num_files(pid: int) -> int:
    """Open files and sockets."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass
class Levels:
    """Memory and files of both processes over time."""

    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def note(self, pids: tuple[int, int]) -> None:
        """Take a sample."""
        front, core = pids
        self.samples.append((rss_mib(front), rss_mib(core), num_files(front), num_files(core)))

    def growth(self) -> list[float]:
        """From the third quarter's median to the last quarter's: MiB of both processes, files of both."""
        quarter = len(self.samples) // 4
        if not quarter:
            return [0.0] * 4
        third, last = self.samples[-2 * quarter : -quarter], self.samples[-quarter:]
        columns = zip(zip(*third, strict=True), zip(*last, strict=True), strict=True)
        return [statistics.median(after) - statistics.median(before) for before, after in columns]

    def complaints(self) -> list[str]:
        """Which of them are not level."""
        if len(self.samples) < LEAST_SAMPLES:
            return []
        growth, found = self.growth(), []
        for number, name in enumerate(("front end", "engine core")):
            bound = max(RSS_BOUND_MIB, RSS_BOUND_SHARE * self.samples[0][number])
            if growth[number] > bound:
                found.append(f"memory of the {name} grows: {growth[number]:.1f} MiB in a quarter, bound {bound:.1f}")
            if growth[2 + number] > FILES_BOUND:
                found.append(f"open files of the {name} grow: {growth[2 + number]:.0f} in a quarter")
        return found


async def schema_complaints(port: int, seed: int, max_examples: int) -> tuple[int, list[str]]:
    """What schemathesis, the second generator, finds on /openapi.json: how many cases it made, and what is wrong."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", "--no-color",
        "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--max-examples", str(max_examples),
        "--seed", str(seed), "--suppress-health-check", "all", "--workers", "4", "--continue-on-failure",
        "--request-timeout", "120", "--warnings", "off",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder
        )
        output = (await child.communicate())[0].decode(errors="replace")
    found = re.search(r"(\d+) generated", output)
    return int(found[1]) if found else 0, [] if child.returncode == 0 and found else [f"schemathesis: {output[-4000:]}"]
