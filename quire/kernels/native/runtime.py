"""NativeRuntime: the kernels of one tier and the threads they run on, given to every wrapper of this package.

Made by the worker. Owns its thread pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.kernels.native.library import choose_tier, load_library, tier_names

# Idle workers spin this long, so that the kernels of a step, and steps while requests run, need no wake-up.
DEFAULT_SPIN_US = 2000


class NativeRuntime:
    """One tier's kernels on one pool of threads.

    Args:
        tier: "auto" for the best that runs here, or a tier's name.
        num_threads: the calling thread included.
        cpus: the CPU of each thread, to which all but the first are bound; empty = not bound.
        spin_us: how long an idle worker spins before it sleeps, in microseconds.

    Attributes:
        library: the extension module.
        tier, tier_idx: the tier's name, and its number in the library.
        pool: the library's thread pool.

    Raises:
        NativeLibraryError: the library cannot be loaded.
        ConfigError: no such tier, or this machine cannot run it.
    """

    def __init__(
        self,
        tier: str = "auto",
        num_threads: int = 1,
        cpus: Sequence[int] = (),
        spin_us: int = DEFAULT_SPIN_US,
    ) -> None:
        self.library: Any = load_library()
        self.tier = choose_tier(tier)
        self.tier_idx = tier_names().index(self.tier)
        self.num_threads = num_threads
        self.pool = self.library.Pool(num_threads, list(cpus), spin_us)
