"""ComputedStep: what passes between the two halves of a step in an executor, through the engine core's hands."""

from __future__ import annotations


class ComputedStep:
    """A step that was computed and not sampled yet: `Executor.execute_model` returns it, `sample_tokens` takes it.

    What a subclass holds is for the executor that made it.
    """

    __slots__ = ()
