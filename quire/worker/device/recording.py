"""Recording: what one rank does while a profile is taken, from its beginning to its end, as events of a trace.

Made by `profiling` on rank 0, by `group_profile` on the others. While it runs the native kernels have a clock, and
captured steps run call by call, with the same bits. Times are microseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.config.profiler import ProfilerConfig
from quire.kernels.native.kernel_clock import KernelClock
from quire.kernels.native.runtime import NativeRuntime

STEPS, KERNELS = 1, 2
FORWARD, SAMPLE = "step: forward", "step: sample"
Event = dict[str, Any]


class Recording:
    """One rank's part of a profile; records from the moment at which it is made.

    Args:
        runtime: of the native kernels; None = the device has others.
        rank: of this process.
    """

    def __init__(self, config: ProfilerConfig, runtime: NativeRuntime | None, rank: int = 0) -> None:
        self._runtime = runtime
        self._rank = rank
        self._steps: list[Event] = []
        self._clock: KernelClock | None = None
        self._torch: torch.profiler.profile | None = None
        if runtime is not None:
            self._clock = runtime.library = KernelClock(runtime.own_library)
        if config.profiler == "torch":
            self._torch = torch.profiler.profile(
                record_shapes=config.torch_profiler_record_shapes, with_stack=config.torch_profiler_with_stack
            )
            self._torch.start()

    def note(self, name: str, start_ns: int, about: dict[str, int]) -> None:
        """A part of a step has ended that began at `start_ns` of `time.perf_counter_ns`."""
        end_ns = time.perf_counter_ns()
        self._steps.append(self._span(STEPS, name, start_ns, end_ns - start_ns, about))

    def stop(self) -> None:
        """Take the clocks away."""
        if self._runtime is not None:
            self._runtime.library = self._runtime.own_library
        if self._torch is not None:
            self._torch.stop()

    def write_torch(self, path: Path) -> bool:
        """Write what torch's profiler recorded; False where it was not asked.

        Raises:
            OSError: it cannot be written.
        """
        if self._torch is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(path))
        return self._torch is not None

    def events(self) -> Iterator[Event]:
        """All events, the names of tracks first."""
        pid = self._rank + 1
        name = f"rank {self._rank} (process {os.getpid()})"
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for track, name in ((STEPS, "steps"), (KERNELS, "kernels")):
            yield {"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield from self._steps
        for call in () if self._clock is None else self._clock.calls:
            about: dict[str, float] = {}
            if call.work is not None:
                about = {"flops": call.work.flops, "bytes": call.work.num_bytes}
                if call.work.sizes is not None:
                    about |= zip(("rows", "inputs", "outputs"), call.work.sizes, strict=True)
            yield self._span(KERNELS, call.name, call.start_ns, call.duration_ns, about)

    def _span(self, track: int, name: str, start_ns: int, duration_ns: int, about: dict[str, Any]) -> Event:
        return {
            "ph": "X", "pid": self._rank + 1, "tid": track, "name": name, "ts": start_ns / 1e3,
            "dur": duration_ns / 1e3, "args": about,
        }  # fmt: skip
