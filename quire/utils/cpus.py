"""Which CPUs this process may use, and how many threads are worth running on them.

Called by `platforms`. Reads the affinity mask (which a cpuset narrows too), the cores behind the CPUs, and the cgroup
quotas, together; a pure reader of the roots it is given, no state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from quire.utils.cgroup import CGROUP_ROOT, PROC_ROOT, cgroup_directories, read_number

CPU_ROOT = Path("/sys/devices/system/cpu")
# The CPUs of one core, siblings of simultaneous multithreading, by newer and older kernels' names.
SIBLING_FILES = ("core_cpus_list", "thread_siblings_list")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCpus:
    """CPUs of this process.

    Attributes:
        ids: CPUs it may be scheduled on, ascending.
        num_cores: physical cores behind them.
        quota: CPUs' worth of time that cgroups allow; None = no quota.
    """

    ids: tuple[int, ...]
    num_cores: int
    quota: float | None

    @property
    def num_threads(self) -> int:
        """Compute threads worth running: one a core, as siblings share its arithmetic units; within the quota."""
        return max(1, min(self.num_cores, math.ceil(self.quota) if self.quota is not None else self.num_cores))


def read_usable_cpus(
    proc_root: Path = PROC_ROOT,
    cgroup_root: Path = CGROUP_ROOT,
    cpu_root: Path = CPU_ROOT,
    affinity: Collection[int] | None = None,
) -> UsableCpus:
    """The CPUs of this process; `affinity` in place of its real mask is for tests."""
    ids = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    cores = {_core_of(cpu, cpu_root) for cpu in ids}
    quotas = [_cpu_quota(directory) for directory in cgroup_directories("cpu", proc_root, cgroup_root)]
    return UsableCpus(
        ids=ids, num_cores=len(cores), quota=min((quota for quota in quotas if quota is not None), default=None)
    )


def _core_of(cpu: int, cpu_root: Path) -> str:
    """A name that the CPUs of one core share; a CPU whose siblings are unknown is a core of its own."""
    for name in SIBLING_FILES:
        try:
            return (cpu_root / f"cpu{cpu}" / "topology" / name).read_text().strip()
        except OSError:
            continue
    return str(cpu)


def _cpu_quota(directory: Path) -> float | None:
    """CPUs' worth of time per period; None = no quota."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        quota_us, period_us = (read_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
    return None if quota == "max" else int(quota) / int(period)
