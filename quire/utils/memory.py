"""How much memory this process may use: /proc and the cgroup tree.

Called by `platforms` and the worker's memory budget. Pure readers of the two roots they are given; no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.utils.cgroup import CGROUP_ROOT, PROC_ROOT, cgroup_directories, read_number

GIB = 1 << 30
MIB = 1 << 20
# cgroup v1 writes "no limit" as a page-rounded 2**63 - 1.
_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Host memory of this process.

    Attributes:
        total_bytes: what it could ever have: physical memory or the tightest cgroup limit.
        available_bytes: what it can still take without pushing anyone out (reclaimable file pages count as free).
        limited_by: the file that decided `available_bytes`.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str


def read_huge_page_mode(sys_root: Path = Path("/sys")) -> str:
    """When the system gives transparent huge pages: "always", "madvise" (to who asks, as Quire does), or "never"."""
    try:
        modes = (sys_root / "kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return next((mode[1:-1] for mode in modes.split() if mode.startswith("[")), "unknown")


class HugePageCount:
    """Bytes of this process for which huge pages were asked for, so that what it got can be compared with it."""

    def __init__(self) -> None:
        self.asked_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Asked for so many more; fewer where they were given back."""
        self.asked_bytes += num_bytes


HUGE_PAGES = HugePageCount()


def format_bytes(num_bytes: int) -> str:
    """A size for people: "9.2 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def read_memory(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> MemoryInfo:
    """The memory of this process: the system's, or that of the tightest memory cgroup above it.

    Raises:
        OSError: there is no `meminfo` under `proc_root`.
    """
    meminfo = _read_meminfo(proc_root / "meminfo")
    total, available = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo["MemFree"])
    limited_by = str(proc_root / "meminfo")
    for directory in cgroup_directories("memory", proc_root, cgroup_root):
        limit = _memory_limit(directory)
        if limit is None:
            continue
        total = min(total, limit)
        headroom = max(0, limit - _unreclaimable_bytes(directory))
        if headroom < available:
            available, limited_by = headroom, str(directory)
    return MemoryInfo(total_bytes=total, available_bytes=available, limited_by=limited_by)


def _read_meminfo(path: Path) -> dict[str, int]:
    """Field -> bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest:
            fields[name] = int(rest.split()[0]) * 1024
    return fields


def _memory_limit(directory: Path) -> int | None:
    """Bytes this cgroup may use; None = no limit of its own."""
    limits = [read_number(directory / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    known = [limit for limit in limits if limit is not None and limit < _V1_NO_LIMIT]
    return min(known) if known else None


def _unreclaimable_bytes(directory: Path) -> int:
    """Bytes in use that the kernel cannot take back: the usage less the file pages not touched lately."""
    usage = read_number(directory / "memory.current")
    key = "inactive_file"
    if usage is None:
        usage, key = read_number(directory / "memory.usage_in_bytes") or 0, "total_inactive_file"
    return max(0, usage - _read_stat(directory / "memory.stat", key))


def _read_stat(path: Path, key: str) -> int:
    """The value of `key` in a "name value" file; 0 when absent."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
