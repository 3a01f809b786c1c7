"""What of a machine makes serving slow or makes it fail, and the fix. Pure functions of `Facts`.

Called by `quire doctor`. Each check returns at most one finding; `CHECKS` is all of them, in the order of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.cli.doctor_facts import EMULATED_TIER, NOT_OFFERED, STRUCTURED, Facts, Folder, read_folder
from quire.config import QuireConfig
from quire.config.server import ServerConfig
from quire.errors import QuireError
from quire.server.http.listening import claim_address
from quire.server.http.origins import is_loopback
from quire.utils.memory import GIB, format_bytes

FAILS, SLOW, RISK = "fails", "slow", "risk"
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre")
IN_MEMORY = ("tmpfs", "ramfs")
MIN_FREE_BYTES = 2 * GIB
MIN_MEMORY_BYTES = GIB
MIN_FILES, MIN_PIDS = 1024, 256
MAX_SOCKET_FOLDER = 60
"""Characters of a directory of Unix sockets: a path has 107, and the names in it take the rest."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem.

    Attributes:
        name: of the check.
        kind: FAILS = something will not work; SLOW = it will be slower than it could; RISK = it is not safe.
        what: is wrong; fix: what to do.
    """

    name: str
    kind: str
    what: str
    fix: str


Check = Callable[[Facts], Finding | None]


def check_machine(facts: Facts) -> Iterator[Finding]:
    """What all checks find."""
    for name, check in CHECKS.items():
        found = check(facts)
        if found is not None:
            assert found.name == name, "a finding has the name of its check"
            yield found


def _native_library(facts: Facts) -> Finding | None:
    if not facts.native_problem:
        return None
    return Finding(
        "native-library", FAILS, facts.native_problem,
        "install a C++17 compiler (Debian: apt-get install g++) and install quire again; until then "
        "--attention-backend torch_reference works, slowly",
    )  # fmt: skip


def _broken_tier(facts: Facts) -> Finding | None:
    broken = [one for one in facts.tiers if one.problem not in (None, NOT_OFFERED)]
    if not broken:
        return None
    return Finding(
        "broken-tier", SLOW, f"the kernels for {broken[0].name} are not used: {broken[0].problem}",
        "update the kernel or the hypervisor, or report it with the output of quire collect-env",
    )  # fmt: skip


def _forced_tier(facts: Facts) -> Finding | None:
    best = next((one.name for one in facts.tiers if one.problem is None), "")
    forced = facts.environment.get("QUIRE_KERNEL_TIER")
    if not forced or forced in ("auto", best, EMULATED_TIER) or not best:
        return None
    return Finding(
        "forced-tier", SLOW, f"QUIRE_KERNEL_TIER={forced}, while {best} runs here", "unset QUIRE_KERNEL_TIER"
    )


def _portable_only(facts: Facts) -> Finding | None:
    if facts.tier != "portable" or facts.environment.get("QUIRE_KERNEL_TIER"):
        return None
    return Finding(
        "no-vector-instructions", SLOW, f"{facts.machine.cpu_name} offers no AVX2: kernels run without vectors",
        "in a virtual machine choose a CPU model that passes AVX2 on (QEMU: -cpu host); else another machine",
    )  # fmt: skip


def _huge_pages(facts: Facts) -> Finding | None:
    if facts.huge_pages != "never":
        return None
    return Finding(
        "huge-pages", SLOW, "transparent huge pages are off: weights and KV cache cost more address translation",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
    )  # fmt: skip


def _memory(facts: Facts) -> Finding | None:
    memory = facts.machine.memory
    if memory.available_bytes >= MIN_MEMORY_BYTES:
        return None
    return Finding(
        "memory", FAILS, f"{format_bytes(memory.available_bytes)} of memory are free ({memory.limited_by})",
        "end other programs, or raise the memory limit of the container",
    )  # fmt: skip


def _swapped(facts: Facts) -> Finding | None:
    if facts.swapped_bytes <= facts.machine.memory.total_bytes // 20:
        return None
    return Finding(
        "swapped-memory", SLOW, f"{format_bytes(facts.swapped_bytes)} of memory are swapped out: the machine is full",
        "end other programs, or give the engine less with --gpu-memory-utilization; then swapoff -a && swapon -a",
    )  # fmt: skip


def _overcommit(facts: Facts) -> Finding | None:
    if facts.overcommit != 2:
        return None
    return Finding(
        "overcommit", FAILS, "vm.overcommit_memory is 2: memory that is reserved and not used counts as used",
        "sysctl vm.overcommit_memory=0",
    )  # fmt: skip


def _quota(facts: Facts) -> Finding | None:
    cpus = facts.machine.cpus
    if cpus is None or cpus.quota is None or cpus.quota >= cpus.num_cores:
        return None
    return Finding(
        "cpu-quota", SLOW,
        f"a cgroup allows {cpus.quota:g} CPUs of time on {cpus.num_cores} cores: steps are paused when it is used up",
        "give the container whole CPUs (docker --cpuset-cpus, Kubernetes: integer limits with the static policy)",
    )  # fmt: skip


def _one_core(facts: Facts) -> Finding | None:
    cpus = facts.machine.cpus
    if cpus is None or cpus.num_cores > 1:
        return None
    return Finding(
        "one-core", SLOW, "one core for computing, the HTTP server and everything else", "give it two cores or more"
    )


def _threads(facts: Facts) -> Finding | None:
    asked, cpus = facts.environment.get("OMP_NUM_THREADS", ""), facts.machine.cpus
    if cpus is None or not asked.isdecimal() or not 0 < int(asked) < cpus.num_threads:
        return None
    return Finding(
        "omp-num-threads", SLOW, f"OMP_NUM_THREADS={asked}, while {cpus.num_threads} threads are worth running here",
        "unset OMP_NUM_THREADS",
    )  # fmt: skip


def _governor(facts: Facts) -> Finding | None:
    if "powersave" not in facts.governors:
        return None
    return Finding(
        "cpu-governor", SLOW, "the frequency governor is powersave", "cpupower frequency-set -g performance (as root)"
    )


def _load(facts: Facts) -> Finding | None:
    cpus = facts.machine.cpus
    count = len(cpus.ids) if cpus is not None else facts.machine.num_cpus
    if facts.load <= 0.5 * count:
        return None
    return Finding(
        "other-load", SLOW, f"{facts.load:.1f} processes run on {count} CPUs already",
        "end them, or keep them away from the CPUs of the engine (taskset, cpusets)",
    )  # fmt: skip


def _steal(facts: Facts) -> Finding | None:
    if facts.steal_share <= 0.05:
        return None
    return Finding(
        "stolen-time", SLOW, f"the hypervisor gave {facts.steal_share:.0%} of this machine's CPU time to others",
        "use an instance with dedicated CPUs",
    )  # fmt: skip


def _nodes(facts: Facts) -> Finding | None:
    cpus = facts.machine.cpus
    if cpus is None or cpus.num_nodes < 2:
        return None
    return Finding(
        "memory-nodes", SLOW, f"{cpus.num_nodes} memory nodes: one engine over all of them reads weights across nodes",
        "large models get a rank on each node by themselves (--numa-ranks auto); for others start one server on each: "
        "numactl --cpunodebind=N --membind=N quire serve ..., or lower --num-threads",
    )  # fmt: skip


def _clock(facts: Facts) -> Finding | None:
    if facts.clock_source in GOOD_CLOCKS:
        return None
    return Finding(
        "clock-source", SLOW, f"the clock source is {facts.clock_source}: reading the time is a slow system call",
        "boot with clocksource=tsc where the CPU's counter is stable",
    )  # fmt: skip


def _files(facts: Facts) -> Finding | None:
    if not 0 <= facts.open_files < MIN_FILES:
        return None
    return Finding(
        "open-files", FAILS, f"this process may open {facts.open_files} files: connections beyond that are refused",
        "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
    )  # fmt: skip


def _pids(facts: Facts) -> Finding | None:
    if facts.max_pids is None or facts.max_pids >= MIN_PIDS:
        return None
    return Finding(
        "max-pids", FAILS, f"a cgroup allows {facts.max_pids} processes and threads",
        "raise it (docker --pids-limit, TasksMax= in the unit)",
    )  # fmt: skip


def _cache_folder(facts: Facts) -> Finding | None:
    if facts.cache is None or facts.cache.is_writable:
        return None
    return Finding(
        "cache-directory", SLOW, f"{facts.cache.path} cannot be written: what could be kept is made at every start",
        "set QUIRE_CACHE_DIR to a directory that this user can write to",
    )  # fmt: skip


def _cache_space(facts: Facts) -> Finding | None:
    if facts.cache is None or facts.cache.free_bytes >= MIN_FREE_BYTES:
        return None
    return Finding(
        "cache-space", FAILS, f"{format_bytes(facts.cache.free_bytes)} are free at {facts.cache.path}: too few",
        "free some (quire list, quire rm), or set QUIRE_CACHE_DIR",
    )  # fmt: skip


def _temporary(facts: Facts) -> Finding | None:
    folder = facts.temporary
    if folder is None or (folder.is_writable and len(folder.path) <= MAX_SOCKET_FOLDER):
        return None
    problem = "cannot be written" if not folder.is_writable else "is too long a path for Unix sockets"
    return Finding(
        "temporary-directory", FAILS, f"{folder.path} {problem}: the engine core cannot be reached",
        "set TMPDIR to a short path that this user can write to",
    )  # fmt: skip


def _torch(facts: Facts) -> Finding | None:
    if "torch" not in facts.packages or facts.packages["torch"] is not None:
        return None
    return Finding("torch", FAILS, "torch is not installed", "pip install quire, or torch from the index of CPU builds")


def _cuda_torch(facts: Facts) -> Finding | None:
    if not facts.torch_is_cuda or facts.gpu_devices:
        return None
    return Finding(
        "cuda-torch-without-gpu", SLOW, "torch is a CUDA build, and there is no GPU: gigabytes of disk, a slower start",
        "pip install torch --index-url of PyTorch's CPU builds",
    )  # fmt: skip


def _unused_gpu(facts: Facts) -> Finding | None:
    if not facts.gpu_devices or facts.torch_is_cuda:
        return None
    return Finding(
        "unused-gpu", SLOW, f"{facts.gpu_devices[0]} is not used: torch was built without CUDA",
        "install a CUDA build of torch",
    )  # fmt: skip


def _structured(facts: Facts) -> Finding | None:
    if not facts.packages or any(facts.packages.get(name) for name in STRUCTURED):
        return None
    return Finding(
        "structured-output", FAILS, "no grammar library is installed: schemas, forced tools and grammars are refused",
        "pip install 'quire[structured]'",
    )  # fmt: skip


CHECKS: dict[str, Check] = {
    "native-library": _native_library, "broken-tier": _broken_tier, "forced-tier": _forced_tier,
    "no-vector-instructions": _portable_only, "torch": _torch, "structured-output": _structured, "memory": _memory,
    "swapped-memory": _swapped, "overcommit": _overcommit, "huge-pages": _huge_pages, "cpu-quota": _quota,
    "one-core": _one_core, "omp-num-threads": _threads, "cpu-governor": _governor, "other-load": _load,
    "stolen-time": _steal, "memory-nodes": _nodes, "clock-source": _clock, "open-files": _files, "max-pids": _pids,
    "cache-directory": _cache_folder, "cache-space": _cache_space, "temporary-directory": _temporary,
    "cuda-torch-without-gpu": _cuda_torch, "unused-gpu": _unused_gpu,
}  # fmt: skip


# --- what is about the settings of a server ---


def check_settings(engine: QuireConfig, server: ServerConfig) -> Iterator[Finding]:
    """Whether these settings would start, and be safe and fast."""
    try:
        for bound in claim_address(server.http) or ():
            bound.close()
    except QuireError as error:
        yield _of("address", error)
    http, api = server.http, server.api
    if http.uds is None and not is_loopback(http.host) and not (api.api_key or api.api_key_file):
        yield Finding(
            "open-address", RISK, f"{http.host} is reached from elsewhere, and there are no API keys",
            "--api-key-file FILE, or --host 127.0.0.1 behind a proxy that checks keys",
        )  # fmt: skip
    if api.api_key:
        what = "an API key on the command line is visible in the list of processes"
        yield Finding("visible-key", RISK, what, "--api-key-file FILE")
    if api.api_key_file is not None and _is_readable_by_others(api.api_key_file):
        yield Finding(
            "readable-keys", RISK, f"other users of this machine can read {api.api_key_file}",
            f"chmod 600 {api.api_key_file}",
        )  # fmt: skip
    for name, path in (("kv-disk", engine.cache.kv_disk), ("flight-recorder", engine.observability.flight_recorder)):
        if path is not None:
            yield from check_disk(name, read_folder(Path(path)))
    profiler = engine.observability.profiler
    if profiler is not None:
        folder = read_folder(Path(profiler.torch_profiler_dir).expanduser())
        yield from (one for one in check_disk("profile", folder) if one.kind == FAILS)


def check_processes(facts: Facts, engine: QuireConfig, server: ServerConfig) -> Iterator[Finding]:
    """Whether this machine and this installation suit the processes that the settings ask for."""
    parallel, cpus = engine.parallel, facts.machine.cpus
    is_ray = parallel.distributed_executor_backend == "ray"
    if is_ray and not facts.has_ray:
        what = "the ranks are to be placed by Ray, which is not installed"
        yield Finding("ray", FAILS, what, "pip install 'quire[ray]', on every machine of the cluster")
    num_here = parallel.data_parallel_size * (1 if is_ray else parallel.num_ranks)
    if cpus is not None and num_here > cpus.num_cores and engine.device.device in ("auto", "cpu"):
        yield Finding(
            "ranks", SLOW, f"{num_here} processes are to compute on {cpus.num_cores} cores: they take turns, and wait",
            "as many ranks times replicas as there are cores at most (--tensor-parallel-size, --data-parallel-size)",
        )  # fmt: skip
    count = server.http.api_server_count
    if cpus is not None and count > 1 and count > len(cpus.ids) - num_here:
        yield Finding(
            "front-ends", SLOW,
            f"{count} front ends next to {num_here} computing processes on {len(cpus.ids)} CPUs: steps get less time",
            "one front end streams some 10,000 tokens a second; leave out --api-server-count, or use more CPUs",
        )  # fmt: skip
    yield from _check_division(engine)
    if engine.supervision.enable_sleep_mode and (facts.cache is None or not facts.cache.is_writable):
        yield Finding(
            "sleep-mode", SLOW, "packed weights cannot be kept: every wake-up packs them anew",
            "set QUIRE_CACHE_DIR to a directory that this user can write to",
        )  # fmt: skip


def _check_division(engine: QuireConfig) -> Iterator[Finding]:
    """How the model is divided among ranks."""
    parallel, max_num_seqs = engine.parallel, engine.scheduler.max_num_seqs
    stages = parallel.pipeline_parallel_size
    if stages > 1 and max_num_seqs is not None and max_num_seqs < stages:
        yield Finding(
            "pipeline-stages", SLOW, f"{max_num_seqs} requests at once keep {max_num_seqs} of {stages} stages at work",
            f"--max-num-seqs {4 * stages} or more, or --tensor-parallel-size in place of stages",
        )  # fmt: skip
    elif stages > 1 and parallel.distributed_executor_backend != "ray":
        yield Finding(
            "pipeline-stages", SLOW, f"{stages} pipeline stages on one machine: each token passes one after the other",
            "--tensor-parallel-size, which computes each layer on all ranks at once; stages are for slow networks",
        )  # fmt: skip
    if parallel.enable_expert_parallel and parallel.num_ranks == 1:
        yield Finding(
            "expert-parallel", SLOW, "whole experts are to be on ranks, and there is one rank: nothing is divided",
            "--tensor-parallel-size 2 or more, or leave out --enable-expert-parallel",
        )  # fmt: skip


def check_disk(name: str, folder: Folder) -> Iterator[Finding]:
    """A directory that is written to while requests run."""
    if not folder.is_writable:
        yield Finding(name, FAILS, f"{folder.path} cannot be written", "choose a directory of this user")
    elif folder.file_system in NETWORK:
        yield Finding(name, SLOW, f"{folder.path} is on {folder.file_system}, over a network", "use a local disk")
    elif folder.file_system in IN_MEMORY:
        yield Finding(name, SLOW, f"{folder.path} is in memory ({folder.file_system})", "use a disk")
    elif folder.free_bytes < MIN_FREE_BYTES:
        yield Finding(name, FAILS, f"{format_bytes(folder.free_bytes)} are free at {folder.path}", "free some")


def _is_readable_by_others(path: str) -> bool:
    try:
        return bool(Path(path).stat().st_mode & 0o077)
    except OSError:
        return False  # what is wrong with it is found where it is read


def _of(name: str, error: QuireError) -> Finding:
    return Finding(name, FAILS, error.message, error.hint or "")


def of_error(name: str, error: QuireError) -> Finding:
    """A start would end with this error."""
    return _of(name, error)
