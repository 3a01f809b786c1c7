"""Profile: steps of a worker with the time of each kernel, from its start to its stop, as a file for ui.perfetto.dev.

Made by the worker when a profile is started; takes the runner's place until it is stopped, so that nothing is tested
while no profile is taken. Of several ranks it is rank 0's, and the file has the tracks of all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from quire.config.profiler import ProfilerConfig
from quire.core.computed_step import ComputedStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.logger import get_logger
from quire.worker.device.recording import FORWARD, SAMPLE, Event, Recording

logger = get_logger(__name__)


class StepRunner(Protocol):
    """What is profiled: a `ModelRunner`."""

    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """Compute a step's tokens."""

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step that was computed."""


class OtherRanks(Protocol):
    """The ranks beside this one."""

    def begin(self) -> None:
        """They record from the next step on."""

    def gather(self, name: str) -> list[Event]:
        """They stop: what they recorded. `name` is that of the profile's files."""


Runner = TypeVar("Runner", bound=StepRunner)


class Profile(Generic[Runner]):
    """One profile; the methods of `ModelRunner` that make a step are its, all others the runner's.

    Args:
        runner: what it stands for.
        record: makes the recording of this rank.
        on_full: called when as many steps as are wanted were recorded.
        others: of a group; None = this rank is alone.

    Attributes:
        num_steps: recorded so far.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        runner: Runner,
        record: Callable[[ProfilerConfig, int], Recording],
        on_full: Callable[[], object],
        others: OtherRanks | None = None,
    ) -> None:
        self.runner = runner
        self._config, self._record, self._on_full, self._others = config, record, on_full, others
        self._recording: Recording | None = None
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
        if self._recording is None:
            if self._others is not None:
                self._others.begin()
            self._recording = self._record(self._config, 0)
        start = time.perf_counter_ns()
        computed = self.runner.execute_model(scheduled)
        num_tokens = self._last_tokens = scheduled.total_num_scheduled_tokens
        num_prompt = int(scheduled.num_scheduled_tokens[scheduled.is_prefill].sum())
        about = {"step": scheduled.step, "requests": len(scheduled.rows), "tokens": num_tokens, "prompt": num_prompt}
        self._recording.note(FORWARD, start, about)
        self.num_steps += 1
        return computed

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """As `ModelRunner`."""
        start = time.perf_counter_ns()
        output = self.runner.sample_tokens(computed, grammar)
        if self._last_tokens >= 0 and self._recording is not None:
            self._recording.note(SAMPLE, start, {"tokens": self._last_tokens})
        if self._config.max_iterations and self.num_steps >= self._config.max_iterations:
            self._on_full()
        return output

    def stop(self) -> Path | None:
        """Stop recording, and write what was recorded; the file, None when there was no step.

        Raises:
            OSError: it cannot be written.
        """
        recording = self._recording
        if recording is None:
            return None
        recording.stop()
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{self.num_steps}-steps"
        events = list(recording.events())
        if self._others is not None:
            events += self._others.gather(name)
        folder = Path(self._config.torch_profiler_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        with path.open("w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)
        recording.write_torch(path.with_suffix(".torch.json"))
        logger.info("profile of %d steps: %s", self.num_steps, path)
        return path
