"""Profile: steps of a worker with the time of each kernel, from its start to its stop, as a file for ui.perfetto.dev.

Made by the worker when a profile is started; takes the runner's place until it is stopped, so that nothing is tested
while no profile is taken. Captured steps run call by call meanwhile, with the same bits. Times are microseconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from quire.config.profiler import ProfilerConfig
from quire.core.computed_step import ComputedStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.kernels.native.kernel_clock import KernelClock
from quire.kernels.native.runtime import NativeRuntime
from quire.logger import get_logger

STEPS, KERNELS = 1, 2
FORWARD, SAMPLE = "step: forward", "step: sample"
Event = dict[str, Any]

logger = get_logger(__name__)


class StepRunner(Protocol):
    """What is profiled: a `ModelRunner`."""

    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """Compute a step's tokens."""

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step that was computed."""


Runner = TypeVar("Runner", bound=StepRunner)


class Profile(Generic[Runner]):
    """One profile; the methods of `ModelRunner` that make a step are its, all others the runner's.

    Args:
        runner: what it stands for.
        runtime: of the native kernels; None = the device has others.
        on_full: called when as many steps as are wanted were recorded.

    Attributes:
        num_steps: recorded so far.
    """

    def __init__(
        self, config: ProfilerConfig, runner: Runner, runtime: NativeRuntime | None, on_full: Callable[[], object]
    ) -> None:
        self.runner = runner
        self._config, self._runtime, self._on_full = config, runtime, on_full
        self._clock: KernelClock | None = None
        self._torch: torch.profiler.profile | None = None
        self._steps: list[Event] = []
        self._num_skipped = self.num_steps = 0
        self._last_tokens = 0

    def __getattr__(self, name: str) -> Any:
        """What is not part of a step."""
        return getattr(self.runner, name)

    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """As `ModelRunner`."""
        if self._num_skipped < self._config.delay_iterations:
            self._num_skipped += 1
            self._last_tokens = -1
            return self.runner.execute_model(scheduled)
        if not self.num_steps:
            self._begin()
        start = time.perf_counter_ns()
        computed = self.runner.execute_model(scheduled)
        num_tokens = self._last_tokens = scheduled.total_num_scheduled_tokens
        num_prompt = int(scheduled.num_scheduled_tokens[scheduled.is_prefill].sum())
        about = {"step": scheduled.step, "requests": len(scheduled.rows), "tokens": num_tokens, "prompt": num_prompt}
        self._note(FORWARD, start, about)
        self.num_steps += 1
        return computed

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """As `ModelRunner`."""
        start = time.perf_counter_ns()
        output = self.runner.sample_tokens(computed, grammar)
        if self._last_tokens >= 0:
            self._note(SAMPLE, start, {"tokens": self._last_tokens})
        if self._config.max_iterations and self.num_steps >= self._config.max_iterations:
            self._on_full()
        return output

    def stop(self) -> list[Path]:
        """Take the clocks away, and write what was recorded; the files, none when there was no step.

        Raises:
            OSError: they cannot be written.
        """
        if self._runtime is not None and self._clock is not None:
            self._runtime.library = self._runtime.own_library
        if self._torch is not None:
            self._torch.stop()
        if not self.num_steps:
            return []
        folder = Path(self._config.torch_profiler_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{self.num_steps}-steps.json"
        with path.open("w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(self._events())}, file)
        files = [path]
        if self._torch is not None:
            files.append(path.with_suffix(".torch.json"))
            self._torch.export_chrome_trace(str(files[1]))
        logger.info("profile of %d steps: %s", self.num_steps, ", ".join(map(str, files)))
        return files

    def _begin(self) -> None:
        if self._runtime is not None:
            self._clock = KernelClock(self._runtime.own_library)
            self._runtime.library = self._clock
        if self._config.profiler == "torch":
            self._torch = torch.profiler.profile(
                record_shapes=self._config.torch_profiler_record_shapes,
                with_stack=self._config.torch_profiler_with_stack,
            )
            self._torch.start()

    def _note(self, name: str, start_ns: int, about: dict[str, int]) -> None:
        end_ns = time.perf_counter_ns()
        self._steps.append(_span(STEPS, name, start_ns, end_ns - start_ns, about))

    def _events(self) -> Iterator[Event]:
        """All events, the names of tracks first."""
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"worker {os.getpid()}"}}
        for track, name in ((STEPS, "steps"), (KERNELS, "kernels")):
            yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield from self._steps
        for call in () if self._clock is None else self._clock.calls:
            about: dict[str, float] = {}
            if call.work is not None:
                about = {"flops": call.work.flops, "bytes": call.work.num_bytes}
                if call.work.sizes is not None:
                    about |= zip(("rows", "inputs", "outputs"), call.work.sizes, strict=True)
            yield _span(KERNELS, call.name, call.start_ns, call.duration_ns, about)


def _span(track: int, name: str, start_ns: int, duration_ns: int, about: dict[str, Any]) -> Event:
    return {
        "ph": "X", "pid": 1, "tid": track, "name": name, "ts": start_ns / 1e3, "dur": duration_ns / 1e3, "args": about,
    }  # fmt: skip
