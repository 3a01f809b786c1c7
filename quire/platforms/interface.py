"""The machine as a value: what config rules and the worker need to know about it. No torch, no device query."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.utils.cpus import UsableCpus
from quire.utils.memory import MemoryInfo

# Without one of these, bfloat16 arithmetic is emulated and slower than float32.
_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One CUDA device. `total_bytes` is its memory; `capability` is (major, minor)."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The machine this process runs on.

    Attributes:
        device: what runs the model: "cpu" or "cuda".
        cpu_name: for logs.
        cpu_flags: instruction sets that both CPU and operating system offer.
        num_cpus: CPUs worth keeping busy: one a physical core, as affinity, cpusets and quotas allow.
        memory: host memory of this process.
        gpus: CUDA devices that the installed torch can use; empty on a CPU platform.
        cpus: what is known of the CPUs, to place threads on them; None = nothing.
    """

    device: str
    cpu_name: str
    cpu_flags: frozenset[str]
    num_cpus: int
    memory: MemoryInfo
    gpus: tuple[GpuInfo, ...] = field(default=())
    cpus: UsableCpus | None = None

    @property
    def is_cpu(self) -> bool:
        """True when the model runs on the CPU."""
        return self.device == "cpu"

    @property
    def has_fast_bfloat16(self) -> bool:
        """True when bfloat16 arithmetic is done in hardware."""
        if self.is_cpu:
            return bool(self.cpu_flags & _BF16_CPU_FLAGS)
        return self.gpus[0].capability >= (8, 0)

    @property
    def memory_bytes(self) -> int:
        """Memory the device can still give: host memory on a CPU, the whole device on CUDA."""
        return self.memory.available_bytes if self.is_cpu else self.gpus[0].total_bytes

    def compute_cpus(self, num_threads: int) -> tuple[int, ...]:
        """The CPU to bind each of `num_threads` compute threads to; empty = bind none."""
        return () if self.cpus is None else self.cpus.compute_cpus(num_threads)

    def describe(self) -> str:
        """One line for logs and `collect-env`."""
        if self.is_cpu:
            return f"cpu: {self.cpu_name}, {self.num_cpus} usable cores"
        return f"cuda: {self.gpus[0].name}, {len(self.gpus)} device(s)"
