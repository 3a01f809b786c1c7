"""The clock by which steps with and without drafts are compared. Used by the engine core and by the model runner."""

from __future__ import annotations

import time
from collections.abc import Callable


def step_clock(computes_here: bool) -> Callable[[], float]:
    """Seconds since some moment.

    Args:
        computes_here: the thread that reads the clock computes the model, with others or alone. Then it is that
            thread's processor time: while other programs have the processor no time passes, which would make one kind
            of steps look slow by chance.
    """
    return time.thread_time if computes_here else time.perf_counter
