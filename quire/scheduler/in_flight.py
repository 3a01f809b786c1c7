"""StepsInFlight: which steps were scheduled and not yet taken in, and the rows that the next message gives back.

Called by the scheduler. Owns the numbers of steps, not the steps: those are their callers' (`scheduler.step`).
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.step import Step


class StepsInFlight:
    """How many steps are in flight, and what the next message begins with.

    Attributes:
        num_steps: scheduled so far; the number of the next one.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_in_flight = 0
        self._freed_rows: list[int] = []

    def __len__(self) -> int:
        return self._num_in_flight

    def free_rows(self, rows: Iterable[int]) -> None:
        """These rows lost their request; the worker is sent them with the next message."""
        self._freed_rows.extend(rows)

    def begin(self) -> tuple[int, list[int]]:
        """A message is made: the number of its step, and the rows that were freed since the last one."""
        number, freed_rows = self.num_steps, self._freed_rows
        self._freed_rows = []
        self.num_steps += 1
        self._num_in_flight += 1
        return number, freed_rows

    def end(self, step: Step) -> None:
        """A step is taken in or abandoned; steps are, once each, in the order in which they were scheduled."""
        is_oldest = self._num_in_flight and step.output.step == self.num_steps - self._num_in_flight
        assert is_oldest, "a step is taken in once, and before those that were scheduled after it"
        self._num_in_flight -= 1

    def free_again(self, step: Step) -> None:
        """The rows that an abandoned step freed go out again: the worker may not have freed them."""
        self._freed_rows = list(dict.fromkeys([*step.output.freed_rows.tolist(), *self._freed_rows]))
