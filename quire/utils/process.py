"""What the system says of a process: memory, CPU time, threads. Pure readers of /proc; no state."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.utils.cgroup import PROC_ROOT

_STAT_MINOR, _STAT_MAJOR, _STAT_USER, _STAT_SYSTEM, _STAT_THREADS, _STAT_START, _STAT_RSS = 7, 9, 11, 12, 17, 19, 21
"""Fields of /proc/PID/stat behind the name of the program."""
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


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


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """One process, as the counters say that the kernel keeps: read in microseconds.

    Attributes:
        rss_bytes: resident memory.
        user_s, system_s: CPU time of all its threads since it started.
        minor_faults, major_faults: page faults without and with a read from a disk.
        num_fds: open files; 0 where another user's are not shown.
        start_s: seconds from the boot of the machine to its start.
    """

    pid: int
    rss_bytes: int
    user_s: float
    system_s: float
    num_threads: int
    minor_faults: int
    major_faults: int
    num_fds: int
    start_s: float


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """What the kernel adds up page by page; takes it milliseconds a GiB.

    Attributes:
        pss_bytes: resident memory, pages that several processes have divided among them.
        huge_bytes: of the resident memory, in huge pages.
        swapped_bytes: that were moved to the machine's swap.
    """

    pss_bytes: int
    huge_bytes: int
    swapped_bytes: int


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


def read_counters(pid: int, proc_root: Path = PROC_ROOT) -> ProcessCounters | None:
    """A process of this machine; None when there is none (any longer), or the system does not say."""
    folder = proc_root / str(pid)
    try:
        words = (folder / "stat").read_text().rpartition(")")[2].split()
        numbers = [int(words[at]) for at in range(1, _STAT_RSS + 1)]
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessCounters(
        pid=pid,
        rss_bytes=numbers[_STAT_RSS - 1] * os.sysconf("SC_PAGE_SIZE"),
        user_s=numbers[_STAT_USER - 1] / ticks,
        system_s=numbers[_STAT_SYSTEM - 1] / ticks,
        num_threads=numbers[_STAT_THREADS - 1],
        minor_faults=numbers[_STAT_MINOR - 1],
        major_faults=numbers[_STAT_MAJOR - 1],
        num_fds=_count(folder / "fd"),
        start_s=numbers[_STAT_START - 1] / ticks,
    )


def read_mapped(pid: int, proc_root: Path = PROC_ROOT) -> MappedMemory | None:
    """Its memory page by page; None as `read_counters`."""
    found = _fields(proc_root / str(pid) / "smaps_rollup")
    if not found:
        return None
    huge = sum(found.get(name, 0) for name in _HUGE)
    return MappedMemory(found.get("Pss", 0) << 10, huge << 10, found.get("Swap", 0) << 10)


def _count(folder: Path) -> int:
    try:
        entries: Iterable[str] = os.listdir(folder)
    except OSError:
        return 0
    return sum(1 for _ in entries)


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
