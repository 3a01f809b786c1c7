"""What `quire doctor` knows of a machine and an installation: read once, then judged by `doctor_checks`.

Reads /proc, /sys, the environment and what is installed, from roots that tests replace. Owns nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire import envs
from quire.errors import ConfigError, NativeLibraryError
from quire.kernels.native.library import EMULATED_TIER as EMULATED_TIER
from quire.kernels.native.library import NOT_OFFERED as NOT_OFFERED
from quire.kernels.native.library import TierReport, choose_tier, examine_tiers
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.utils.cgroup import CGROUP_ROOT, PROC_ROOT, cgroup_directories, read_number
from quire.utils.memory import read_huge_page_mode

SYS_ROOT = Path("/sys")
STRUCTURED = ("xgrammar", "llguidance")
PACKAGES = ("torch", "numpy", "msgspec", "pyzmq", "tokenizers", "starlette", "uvicorn", *STRUCTURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A directory that is written to: where it is, whether it can be, bytes that are free, and its file system."""

    path: str
    is_writable: bool
    free_bytes: int
    file_system: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine and an installation.

    Attributes:
        tiers: of the native kernels, best first; tier: the one that is chosen; native_problem: why there are none.
        huge_pages: "always", "madvise", "never" or "unknown".
        governors: of CPU frequency, of the CPUs of this process.
        load: runnable processes on average over the last minute.
        swapped_bytes: of all processes in the swap space.
        steal_share: of CPU time that the hypervisor gave to others, since the machine started.
        overcommit: vm.overcommit_memory.
        max_pids: of the tightest cgroup; None = no limit.
        open_files: that this process may have.
        packages: name -> version; None = not installed.
        torch_is_cuda: it was built for CUDA; torch_problem: why it cannot be found, "" = it can.
        gpu_devices: files of NVIDIA devices.
        has_ray: Ray is installed.
    """

    machine: Platform
    tiers: tuple[TierReport, ...] = ()
    tier: str = ""
    native_problem: str = ""
    huge_pages: str = "unknown"
    governors: frozenset[str] = frozenset()
    clock_source: str = ""
    load: float = 0.0
    swapped_bytes: int = 0
    steal_share: float = 0.0
    overcommit: int = 0
    max_pids: int | None = None
    open_files: int = 1 << 20
    cache: Folder | None = None
    temporary: Folder | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    torch_is_cuda: bool = False
    gpu_devices: tuple[str, ...] = ()
    has_ray: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def read_facts(proc_root: Path = PROC_ROOT, sys_root: Path = SYS_ROOT, cgroup_root: Path = CGROUP_ROOT) -> Facts:
    """This machine, as it is now."""
    machine = detect_platform("cpu", proc_root=proc_root, cgroup_root=cgroup_root)
    tiers, tier, native_problem = _read_tiers()
    cpus = () if machine.cpus is None else machine.cpus.ids
    cache = envs.cache_dir()
    packages = {name: _version(name) for name in PACKAGES}
    return Facts(
        machine=machine, tiers=tiers, tier=tier, native_problem=native_problem,
        huge_pages=read_huge_page_mode(sys_root),
        governors=frozenset(
            _text(sys_root / f"devices/system/cpu/cpu{number}/cpufreq/scaling_governor") for number in cpus
        ) - {""},
        clock_source=_text(sys_root / "devices/system/clocksource/clocksource0/current_clocksource"),
        load=float((_text(proc_root / "loadavg") or "0").split()[0]),
        swapped_bytes=_swapped_bytes(proc_root), steal_share=_steal_share(proc_root),
        overcommit=read_number(proc_root / "sys/vm/overcommit_memory") or 0,
        max_pids=_max_pids(proc_root, cgroup_root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cache=None if cache is None else read_folder(cache, proc_root),
        temporary=read_folder(Path(tempfile.gettempdir()), proc_root),
        packages=packages,
        torch_is_cuda="+cpu" not in (packages["torch"] or "+cpu") and _has_module("triton"),
        gpu_devices=tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))),
        has_ray=_has_module("ray"), environment=dict(os.environ),
    )  # fmt: skip


def read_folder(path: Path, proc_root: Path = PROC_ROOT) -> Folder:
    """A directory, or the one above it that exists."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    free = shutil.disk_usage(there).free if there.exists() else 0
    return Folder(path=str(path), is_writable=is_writable, free_bytes=free, file_system=_file_system(there, proc_root))


def _read_tiers() -> tuple[tuple[TierReport, ...], str, str]:
    try:
        return examine_tiers(), choose_tier("auto"), ""
    except (NativeLibraryError, ConfigError) as error:
        return (), "", error.message


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _swapped_bytes(proc_root: Path) -> int:
    fields = dict(line.split(":", 1) for line in _text(proc_root / "meminfo").splitlines() if ":" in line)
    total, free = (int(fields.get(name, "0").split()[0]) for name in ("SwapTotal", "SwapFree"))
    return (total - free) << 10


def _steal_share(proc_root: Path) -> float:
    """The first line of /proc/stat: cpu user nice system idle iowait irq softirq steal ..."""
    numbers = [int(one) for one in _text(proc_root / "stat").partition("\n")[0].split()[1:] if one.isdecimal()]
    total = sum(numbers)
    return numbers[7] / total if len(numbers) > 7 and total else 0.0


def _max_pids(proc_root: Path, cgroup_root: Path) -> int | None:
    limits = [read_number(one / "pids.max") for one in cgroup_directories("pids", proc_root, cgroup_root)]
    return min((one for one in limits if one is not None), default=None)


def _file_system(path: Path, proc_root: Path) -> str:
    """The type of the mount that holds a path."""
    best, found = -1, ""
    for line in _text(proc_root / "mounts").splitlines():
        parts = line.split()
        if len(parts) > 2 and (path == Path(parts[1]) or Path(parts[1]) in path.parents) and len(parts[1]) > best:
            best, found = len(parts[1]), parts[2]
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
