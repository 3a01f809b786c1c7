"""NativeRuntime: the kernels of one tier and the threads they run on, given to every wrapper of this package.

Made by the worker. Owns its thread pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from quire.errors import ConfigError, NativeLibraryError
from quire.kernels.native.library import choose_tier, load_library, tier_names
from quire.logger import get_logger

logger = get_logger(__name__)

# Idle workers spin this long, so that the kernels of a step, and steps while requests run, need no wake-up.
DEFAULT_SPIN_US = 2000


class Scratch(Protocol):
    """Where results go while a step is recorded."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory stays where it is for as long as the recording may be replayed."""


class NativeRuntime:
    """One tier's kernels on one pool of threads.

    Args:
        tier: "auto" for the best that runs here, or a tier's name.
        num_threads: the calling thread included.
        cpus: the CPU of each thread, to which all but the first are bound; empty = not bound.
        spin_us: how long an idle worker spins before it sleeps, in microseconds.

    Attributes:
        library: the extension module, or what stands for it while a profile is taken (`kernel_clock`).
        own_library: the extension module.
        tier, tier_idx: the tier's name, and its number in the library.
        pool: the library's thread pool.
        scratch: where results go; None = to memory of their own.

    Raises:
        NativeLibraryError: the library cannot be loaded, or the system has no more threads to give.
        ConfigError: no such tier, this machine cannot run it, or numbers that make no pool.
    """

    def __init__(
        self,
        tier: str = "auto",
        num_threads: int = 1,
        cpus: Sequence[int] = (),
        spin_us: int = DEFAULT_SPIN_US,
    ) -> None:
        self.own_library: Any = load_library()
        self.library = self.own_library
        self.tier = choose_tier(tier)
        self.tier_idx = tier_names().index(self.tier)
        self.num_threads = num_threads
        self.pool = _make_pool(self.library, num_threads, list(cpus), spin_us)
        self.scratch: Scratch | None = None

    @property
    def is_profiled(self) -> bool:
        """True while each kernel is to be called by itself, and timed."""
        return self.library is not self.own_library

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the result of a kernel."""
        return torch.empty(shape, dtype=dtype) if self.scratch is None else self.scratch.empty(shape, dtype)


def _make_pool(library: Any, num_threads: int, cpus: list[int], spin_us: int) -> Any:
    if cpus and len(cpus) != num_threads:
        raise ConfigError(
            f"{len(cpus)} CPUs were given for {num_threads} threads",
            hint="pass one CPU per thread, or none",
            field="num_threads",
        )
    try:
        pool = library.Pool(num_threads, cpus, spin_us)
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            f"cannot create a pool of {num_threads} threads on CPUs {cpus}, spinning {spin_us} us: {cause}",
            hint="use 1 to 4096 threads, and CPUs of this machine",
            field="num_threads",
        ) from cause
    except RuntimeError as cause:
        raise NativeLibraryError(
            f"cannot create {num_threads - 1} threads: {cause}",
            hint="use a smaller num_threads, or raise the process limit (ulimit -u, pids.max of the cgroup)",
            field="num_threads",
        ) from cause
    if pool.num_unbound:
        logger.warning("%d of %d compute threads could not be pinned to their CPU", pool.num_unbound, num_threads)
    return pool
