"""What the system says of a process: memory, CPU time, threads. Pure readers of /proc; no state."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from quire.utils.cgroup import PROC_ROOT


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process.

    Attributes:
        rss_bytes: resident memory; 0 where the system does not say.
        cpu_s: user and system time of all its threads since it started.
    """

    pid: int
    rss_bytes: int
    cpu_s: float
    num_threads: int


def read_own_usage(proc_root: Path = PROC_ROOT) -> ProcessUsage:
    """This process, as it is now.

    Read from counters that the kernel keeps: what it adds up page by page (`smaps`) takes milliseconds a GiB.
    """
    times = os.times()
    status = _fields(proc_root / "self/status")
    return ProcessUsage(
        pid=os.getpid(),
        rss_bytes=status.get("VmRSS", 0) << 10,
        cpu_s=times.user + times.system,
        num_threads=status.get("Threads", threading.active_count()),
    )


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a "Name: number unit" file; empty where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0])
    return found
