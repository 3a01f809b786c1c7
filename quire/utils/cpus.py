"""Which CPUs this process may use, how many threads are worth running on them, and where each belongs.

Called by `platforms`. Reads the affinity mask (which a cpuset narrows too), the cores and memory nodes behind the CPUs,
and the cgroup quotas, together; a pure reader of the roots it is given, no state.
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
# How fast a core is compared with the others of a machine that has several kinds.
SPEED_FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
# From this many cores on, one more adds less than what interruptions by Python's threads cost the others.
CORES_TO_SPARE_ONE = 8


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Attributes:
        cpus: its CPUs that this process may use, ascending; the first computes, siblings are for other threads.
        node: the memory node it is next to.
        speed: a number to compare with other cores'; 0 = not known.
    """

    cpus: tuple[int, ...]
    node: int = 0
    speed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCpus:
    """CPUs of this process.

    Attributes:
        ids: CPUs it may be scheduled on, ascending.
        cores: physical cores behind them, by their lowest CPU.
        quota: CPUs' worth of time that cgroups allow; None = no quota.
    """

    ids: tuple[int, ...]
    cores: tuple[Core, ...]
    quota: float | None

    @property
    def num_cores(self) -> int:
        """Physical cores."""
        return len(self.cores)

    @property
    def num_nodes(self) -> int:
        """Memory nodes that the cores are next to."""
        return len({core.node for core in self.cores})

    @property
    def has_siblings(self) -> bool:
        """True when a core has a second CPU for threads that do not compute."""
        return any(len(core.cpus) > 1 for core in self.cores)

    @property
    def num_threads(self) -> int:
        """Compute threads worth running.

        One a core, as siblings share its arithmetic units; within the quota. Of many cores without siblings one is
        left to Python's threads: every kernel ends when its last thread does.
        """
        num_threads = self.num_cores
        if num_threads >= CORES_TO_SPARE_ONE and not self.has_siblings:
            num_threads -= 1
        if self.quota is not None:
            num_threads = min(num_threads, math.ceil(self.quota))
        return max(1, num_threads)

    def compute_cpus(self, num_threads: int) -> tuple[int, ...]:
        """The CPU of each compute thread; empty = leave them to the operating system.

        Threads are bound where it matters which CPU they get: one a core where cores have siblings, on as few memory
        nodes as hold them, the fastest cores first. Elsewhere, under a quota, and for more threads than cores, the
        scheduler knows better: it moves a thread away from a CPU that others use.
        """
        kinds = len({core.speed for core in self.cores})
        is_choice = self.has_siblings or self.num_nodes > 1 or (kinds > 1 and num_threads < self.num_cores)
        if num_threads < 2 or num_threads > self.num_cores or self.quota is not None or not is_choice:
            return ()
        nodes: dict[int, list[Core]] = {}
        for core in sorted(self.cores, key=lambda core: (-core.speed, core.cpus)):
            nodes.setdefault(core.node, []).append(core)
        # The smallest node that holds all threads; else the largest nodes first.
        fitting = [node for node, cores in nodes.items() if len(cores) >= num_threads]
        if fitting:
            order = [min(fitting, key=lambda node: (len(nodes[node]), -sum(c.speed for c in nodes[node]), node))]
        else:
            order = sorted(nodes, key=lambda node: (-len(nodes[node]), node))
        chosen = [core for node in order for core in nodes[node]]
        return tuple(core.cpus[0] for core in chosen[:num_threads])

    def rank_cpus(self, rank: int, num_ranks: int, num_threads: int) -> tuple[int, ...]:
        """The CPU of each of a rank's threads; empty = leave them to the operating system.

        Where there are several memory nodes, ranks are spread over them evenly, as far as a node has a core for each
        thread of its ranks: a rank's memory is then next to its cores.
        """
        nodes = sorted({core.node for core in self.cores})
        per_node = math.ceil(num_ranks / len(nodes))
        own_node, place = nodes[rank // per_node], rank % per_node
        cores = [core for core in self.cores if core.node == own_node]
        first = place * num_threads
        fits = all(
            sum(core.node == node for core in self.cores) >= per_node * num_threads
            for node in nodes[: math.ceil(num_ranks / per_node)]
        )
        if len(nodes) > 1 and self.quota is None and fits:
            return tuple(core.cpus[0] for core in cores[first : first + num_threads])
        first = rank * num_threads
        return self.compute_cpus(num_ranks * num_threads)[first : first + num_threads]

    def cpus_of_nodes(self, cpus: Collection[int]) -> tuple[int, ...]:
        """All CPUs on the memory nodes of the cores that these compute on."""
        nodes = {core.node for core in self.cores if core.cpus[0] in cpus}
        return tuple(cpu for core in self.cores if core.node in nodes for cpu in core.cpus)

    def describe(self) -> str:
        """One line for `collect-env`."""
        parts = [f"{len(self.ids)} CPUs on {self.num_cores} cores of {self.num_nodes} memory nodes"]
        parts.append("with siblings" if self.has_siblings else "without siblings")
        parts.append("no quota" if self.quota is None else f"a quota of {self.quota:g} CPUs")
        return ", ".join(parts)


def read_usable_cpus(
    proc_root: Path = PROC_ROOT,
    cgroup_root: Path = CGROUP_ROOT,
    cpu_root: Path = CPU_ROOT,
    affinity: Collection[int] | None = None,
) -> UsableCpus:
    """The CPUs of this process; `affinity` in place of its real mask is for tests. Nodes are read beside `cpu_root`."""
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    ids = sorted(allowed & (_read_list(cpu_root / "online") or allowed)) or sorted(allowed)
    nodes = _read_nodes(cpu_root.parent / "node")
    siblings: dict[str, list[int]] = {}
    for cpu in ids:
        siblings.setdefault(_core_of(cpu, cpu_root), []).append(cpu)
    cores = tuple(
        Core(tuple(cpus), nodes.get(cpus[0], 0), _speed_of(cpus[0], cpu_root)) for cpus in sorted(siblings.values())
    )
    quotas = [_cpu_quota(directory) for directory in cgroup_directories("cpu", proc_root, cgroup_root)]
    quota = min((quota for quota in quotas if quota is not None), default=None)
    return UsableCpus(ids=tuple(ids), cores=cores, quota=quota)


def _core_of(cpu: int, cpu_root: Path) -> str:
    """A name that the CPUs of one core share; a CPU whose siblings are unknown is a core of its own."""
    for name in SIBLING_FILES:
        try:
            return (cpu_root / f"cpu{cpu}" / "topology" / name).read_text().strip()
        except OSError:
            continue
    return str(cpu)


def _speed_of(cpu: int, cpu_root: Path) -> int:
    numbers = (read_number(cpu_root / f"cpu{cpu}" / name) for name in SPEED_FILES)
    return next((number for number in numbers if number is not None), 0)


def _read_nodes(node_root: Path) -> dict[int, int]:
    """CPU -> memory node."""
    return {
        cpu: int(folder.name.removeprefix("node"))
        for folder in node_root.glob("node[0-9]*")
        for cpu in _read_list(folder / "cpulist")
    }


def _read_list(path: Path) -> set[int]:
    """The numbers in a file like "0-3,8"; empty where there is none."""
    try:
        ranges = [part.partition("-") for part in path.read_text().strip().split(",")]
        return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()


def _cpu_quota(directory: Path) -> float | None:
    """CPUs' worth of time per period; None = no quota."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        quota_us, period_us = (read_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
    return None if quota == "max" else int(quota) / int(period)
