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
# Ways to read: which is fastest differs from one kind of processor to the next, and with the hour of a shared one.
STREAMS = (1, 2, 4, 8)


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
        self._small_pages = torch.ones(READ_BYTES, dtype=torch.uint8)

    def measure(self, kind: str, rounds: int = 5) -> float:
        """Bytes a second of "read", or multiplications and additions a second of "float32", "bf16" or "int8".

        "read": the best of `read_ways`. The others: products from registers, or of tiles from level 1 cache with random
        values; the unit that the tier has. 0.0 = it has none.
        """
        if kind == "read":
            return max(self.read_ways(rounds).values())
        return self._rate(kind, self._buffer.address, STEPS, rounds)

    def read_ways(self, rounds: int = 5) -> dict[str, float]:
        """Bytes a second by 1, 2, 4 and 8 streams of 1 KB in each thread, on huge and on small pages."""
        pages = {"huge pages": self._buffer.address, "small pages": self._small_pages.data_ptr()}
        return {
            f"{num_streams} streams, {name}": self._rate("read", address, num_streams, rounds)
            for name, address in pages.items()
            for num_streams in STREAMS
        }

    def _rate(self, kind: str, address: int, steps: int, rounds: int) -> float:
        done = 0.0

        def run() -> None:
            nonlocal done
            runtime = self._runtime
            done = runtime.library.run_ceiling(runtime.tier_idx, runtime.pool, KINDS[kind], address, READ_BYTES, steps)

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
    ways = ceilings.read_ways()
    figures = {kind: max(ways.values()) if kind == "read" else ceilings.measure(kind) for kind in KINDS}
    print(f"tier {runtime.tier}, {args.threads} threads")
    for way, figure in ways.items():
        print(f"{way:24s} {figure / 1e9:8.1f} GB/s")
    for kind, figure in figures.items():
        unit = "GB/s" if kind == "read" else "G multiplications and additions a second"
        print(f"{kind:8s} {figure / 1e9:8.1f} {unit}")
    print(json.dumps({"tier": runtime.tier, "threads": args.threads, **figures}))


if __name__ == "__main__":
    main()
