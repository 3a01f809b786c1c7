"""Look at the machine once and describe it as a `Platform`. Called by the entry points; keeps nothing."""

from __future__ import annotations

from pathlib import Path

from quire import envs
from quire.errors import ConfigError
from quire.platforms.cpu import read_cpu
from quire.platforms.cuda import read_gpus, torch_has_cuda
from quire.platforms.interface import GpuInfo, Platform
from quire.utils.cgroup import CGROUP_ROOT, PROC_ROOT
from quire.utils.cpus import UsableCpus, read_usable_cpus
from quire.utils.memory import read_memory


def detect_platform(device: str = "auto", *, proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> Platform:
    """The machine, with `device` chosen.

    Args:
        device: "cpu", "cuda", or "auto" = CUDA when the driver has a device and torch was built for it.
        proc_root, cgroup_root: where to read; other roots are for tests.

    Raises:
        ConfigError: "cuda" was asked for and cannot be had, or the device is unknown.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}", hint="valid: auto, cpu, cuda", field="device")
    gpus = () if device == "cpu" else _usable_gpus(required=device == "cuda")
    cpu_name, cpu_flags = read_cpu(proc_root)
    cpus = read_usable_cpus(proc_root, cgroup_root)
    return Platform(
        device="cuda" if gpus else "cpu",
        cpu_name=cpu_name,
        cpu_flags=cpu_flags,
        num_cpus=_num_cpus(cpus),
        memory=read_memory(proc_root, cgroup_root),
        gpus=gpus,
        cpus=cpus,
    )


def _num_cpus(cpus: UsableCpus) -> int:
    """CPUs worth keeping busy, or OMP_NUM_THREADS when that is fewer."""
    asked = envs.omp_num_threads()
    return cpus.num_threads if asked is None else min(cpus.num_threads, asked)


def _usable_gpus(*, required: bool) -> tuple[GpuInfo, ...]:
    has_cuda = torch_has_cuda()
    gpus = read_gpus() if has_cuda else ()
    if required and not gpus:
        reason = "the driver reports no device" if has_cuda else "the installed torch was built without CUDA"
        raise ConfigError(f"device 'cuda' cannot be used: {reason}", hint="use device='cpu'", field="device")
    return gpus
