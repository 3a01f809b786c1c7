"""What this machine gives at most, measured: the figures that the kernel benchmarks divide by.

Run alone to print them: `python benchmarks/kernels/ceilings.py --threads 2`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable

import torch

from quire.kernels.native.runtime import NativeRuntime

# Numbers of `Ceiling` in csrc/include/quire/gemm.h.
KINDS = {"read": 0, "float32": 1, "bf16": 2, "int8": 3}
READ_BYTES = 1 << 28
STEPS = 20_000


CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


def median_seconds(call: Callable[[], object], rounds: int, warm_up: int = 2, clock: str = "wall") -> float:
    """Median time of one call; the clock "thread" counts this thread's work alone, so not what others take from it."""
    now = CLOCKS[clock]
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(rounds):
        start = now()
        call()
        times.append(now() - start)
    return statistics.median(times)


class HugeBuffer:
    """Memory on huge pages, for as long as this object lives."""

    def __init__(self, runtime: NativeRuntime, num_bytes: int) -> None:
        self._library, self.num_bytes = runtime.library, num_bytes
        self.address = self._library.map_huge(num_bytes)
        if not self.address:
            raise MemoryError(f"{num_bytes} bytes")

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """All of it; valid while this object lives."""
        raw = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return torch.frombuffer(raw, dtype=dtype)

    def __del__(self) -> None:
        self._library.unmap_huge(self.address, self.num_bytes)


class Ceilings:
    """Measured again at every call: a shared machine changes from minute to minute."""

    def __init__(self, runtime: NativeRuntime, clock: str = "wall") -> None:
        self._runtime, self._clock = runtime, clock
        self._buffer = HugeBuffer(runtime, READ_BYTES)
        self._buffer.tensor().fill_(1)

    def measure(self, kind: str, rounds: int = 5) -> float:
        """Bytes a second of "read", or multiplications and additions a second of "float32", "bf16" or "int8".

        "read": four streams of 1 KB in each thread, on huge pages. The others: products from registers, or of tiles
        from level 1 cache with random values; the unit that the tier has. 0.0 = it has none.
        """
        done = 0.0

        def run() -> None:
            nonlocal done
            runtime = self._runtime
            done = runtime.library.run_ceiling(
                runtime.tier_idx, runtime.pool, KINDS[kind], self._buffer.address, READ_BYTES, STEPS
            )

        seconds = median_seconds(run, rounds, warm_up=1, clock=self._clock)
        return done / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a shared machine")
    args = parser.parse_args()
    runtime = NativeRuntime(args.tier, args.threads)
    ceilings = Ceilings(runtime, args.clock)
    figures = {kind: ceilings.measure(kind) for kind in KINDS}
    print(f"tier {runtime.tier}, {args.threads} threads")
    for kind, figure in figures.items():
        unit = "GB/s" if kind == "read" else "G multiplications and additions a second"
        print(f"{kind:8s} {figure / 1e9:8.1f} {unit}")
    print(json.dumps({"tier": runtime.tier, "threads": args.threads, **figures}))


if __name__ == "__main__":
    main()
