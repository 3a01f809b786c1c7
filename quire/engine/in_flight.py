"""InFlight: steps that an executor of several pipeline stages computes while the next ones are scheduled.

Owned by the engine core, which has none where steps run one after the other. Stage 0 computes a step while later stages
compute those before it; the oldest is sampled when there is no room for another, or nothing to schedule.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from quire.core.computed_step import ComputedStep
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.step import Step


class ComputingStep(NamedTuple):
    """A step that was given to the executor at the time `start` and is not sampled yet."""

    step: Step
    computed: ComputedStep
    start: float


class InFlight:
    """The steps, oldest first.

    Args:
        depth: most of them.

    Attributes:
        outputs: of steps that were taken in, for the caller of the core.
        last_end: time at which the newest of these was.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.steps: deque[ComputingStep] = deque()
        self.outputs: deque[EngineCoreOutputs] = deque()
        self.last_end = 0.0

    def __bool__(self) -> bool:
        return bool(self.steps or self.outputs)

    @property
    def has_room(self) -> bool:
        """Another step may be scheduled."""
        return len(self.steps) < self._depth

    def must_end_before(self, output: SchedulerOutput) -> bool:
        """A step gives rows to others that are yet to be sampled: their requests were preempted or aborted."""
        freed = output.freed_rows
        return len(freed) > 0 and any(np.isin(freed, one.step.rows).any() for one in self.steps)
