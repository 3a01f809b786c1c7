"""StepWatch: what the newest steps did, kept while someone looks at the engine.

Made by the engine core when its state is asked for, and given up when it is not asked for any longer; without a viewer
a step costs one `is None`. Owns two short logs: steps, and the parts of prompts that they computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.core.live_state import ChunkRecord, StepRecord
from quire.scheduler.step import Step

MAX_STEPS, MAX_CHUNKS = 128, 512
LOOKED_AT_S = 10.0
"""For so long after the last look steps are noted."""


class StepWatch:
    """Notes steps until `LOOKED_AT_S` after the last look.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._chunks: deque[ChunkRecord] = deque(maxlen=MAX_CHUNKS)

    def look(self) -> tuple[list[StepRecord], list[ChunkRecord]]:
        """What is noted; a reader tells by the numbers of steps what it has seen before."""
        self._looked_s = self._clock()
        return list(self._steps), list(self._chunks)

    def note(self, step: Step, seconds: float) -> bool:
        """A step has ended, `seconds` after its begin; False when the last look is long ago, and the watch may go."""
        end_s, output = self._clock(), step.output
        prompts = np.flatnonzero(output.is_prefill)
        num_prompt_tokens = int(output.num_scheduled_tokens[prompts].sum())
        self._steps.append(
            StepRecord(
                output.step, end_s, seconds, len(output.rows), output.total_num_scheduled_tokens, num_prompt_tokens
            )
        )
        for at in prompts.tolist():
            first, num_tokens = int(output.num_computed_tokens[at]), int(output.num_scheduled_tokens[at])
            self._chunks.append(
                ChunkRecord(output.step, int(step.handles[at]), "prefill", end_s - seconds, end_s, first, num_tokens)
            )
        for handle in step.swapped_out:
            self._chunks.append(ChunkRecord(output.step, handle, "swapped", end_s - seconds, end_s, 0, 0))
        return end_s - self._looked_s < LOOKED_AT_S
