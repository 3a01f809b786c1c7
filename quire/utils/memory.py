"""How much memory and how many CPUs this process may use: /proc, affinity, and the cgroup tree.

Called by `platforms` and the worker's memory budget. Pure readers of the two roots they are given; no state.
Understands cgroup v1 and v2, with or without a cgroup namespace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
PROC_ROOT = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
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
    for directory in _cgroup_directories("memory", proc_root, cgroup_root):
        limit = _memory_limit(directory)
        if limit is None:
            continue
        total = min(total, limit)
        headroom = max(0, limit - _unreclaimable_bytes(directory))
        if headroom < available:
            available, limited_by = headroom, str(directory)
    return MemoryInfo(total_bytes=total, available_bytes=available, limited_by=limited_by)


def count_usable_cpus(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> int:
    """CPUs this process may keep busy: its affinity mask, cut by the tightest cgroup quota; at least 1."""
    count = float(len(os.sched_getaffinity(0)))
    for directory in _cgroup_directories("cpu", proc_root, cgroup_root):
        quota = _cpu_quota(directory)
        if quota is not None:
            count = min(count, quota)
    return max(1, math.ceil(count))


def _read_meminfo(path: Path) -> dict[str, int]:
    """Field -> bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest:
            fields[name] = int(rest.split()[0]) * 1024
    return fields


def _cgroup_directories(controller: str, proc_root: Path, cgroup_root: Path) -> Iterator[Path]:
    """This process's directory in each hierarchy that has `controller`, then its parents up to the mount point.

    Inside a container the path in /proc may not exist under the mount; the parents that do exist are visited.
    """
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in _mounts(controllers, controller, cgroup_root):
            yield from _upwards(mount, path)


def _mounts(controllers: str, controller: str, cgroup_root: Path) -> list[Path]:
    """Where a hierarchy may be mounted: v1 (named controllers) has a folder per controller set, v2 has none."""
    if not controllers:
        return [cgroup_root, cgroup_root / "unified"]
    return [cgroup_root / name for name in dict.fromkeys((controller, controllers))]


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Existing directories from mount/path up to mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        directory = mount.joinpath(*parts[:depth])
        if directory.is_dir():
            yield directory


def _memory_limit(directory: Path) -> int | None:
    """Bytes this cgroup may use; None = no limit of its own."""
    limits = [_read_number(directory / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    known = [limit for limit in limits if limit is not None and limit < _V1_NO_LIMIT]
    return min(known) if known else None


def _unreclaimable_bytes(directory: Path) -> int:
    """Bytes in use that the kernel cannot take back: the usage less the file pages nobody touched lately."""
    usage = _read_number(directory / "memory.current")
    key = "inactive_file"
    if usage is None:
        usage, key = _read_number(directory / "memory.usage_in_bytes") or 0, "total_inactive_file"
    return max(0, usage - _read_stat(directory / "memory.stat", key))


def _cpu_quota(directory: Path) -> float | None:
    """CPUs' worth of time per period; None = no quota."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        quota_us, period_us = (_read_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
    return None if quota == "max" else int(quota) / int(period)


def _read_number(path: Path) -> int | None:
    """The number in a one-line file; None when there is no such file or no number ("max")."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    """The value of `key` in a "name value" file; 0 when absent."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
