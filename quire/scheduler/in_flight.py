"""StepsInFlight: which steps were scheduled and not yet taken in, and the rows that the next message gives back.

Called by the scheduler. Owns the numbers of steps, not the steps: those are their callers' (`scheduler.step`). With a
depth of 1 nothing else is done. With more, the next step is planned as if those in flight were taken in and ended no
request: the worker, which runs steps in order, has the token that the scheduler does not know yet.

Example with depth 2, a prompt of 5 tokens:

    schedule: step 0 computes tokens 0-4, samples token 5     num_computing 5, num_pending 1
    schedule: step 1 computes token 5, samples token 6        num_computing 6, num_pending 2
    take in step 0: it sampled EOS                            the row is free; what step 1 brings for it is dropped

Where the worker has a token only once its step is taken in, as with pipeline stages, a row whose token is not known
waits, and each step takes a share of the decoding rows, so that there are some for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.request_table import NEEDS_TOKEN, RequestTable, RowFlag
from quire.scheduler.step import Step

_IS_BEAM = int(RowFlag.BEAM)


class StepsInFlight:
    """How many steps are in flight, and what the next message begins with.

    Args:
        depth: most steps that may be in flight, at least 1.
        waits_for_tokens: the worker does not have a token before its step is taken in.

    Attributes:
        num_steps: scheduled so far; the number of the next one.
        looks_ahead: steps may be planned while others are in flight.
    """

    def __init__(self, table: RequestTable, depth: int, *, waits_for_tokens: bool = False) -> None:
        self._table = table
        self._depth = depth
        self._waits_for_tokens = waits_for_tokens
        self.looks_ahead = depth > 1
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

    @property
    def is_full(self) -> bool:
        """Whether a step has to be taken in before the next one is scheduled."""
        return self._num_in_flight >= self._depth

    def note_message(self, output: SchedulerOutput, rows: np.ndarray) -> np.ndarray | None:
        """The message of the step that has begun, and its rows as indices; `Step.placements` of it."""
        if self._depth == 1:
            return None
        table = self._table
        table.num_computing[rows] += output.num_scheduled_tokens
        num_logits = output.num_logits()
        table.num_pending[rows[output.is_sampling]] += num_logits
        table.num_drafting[rows[output.is_sampling]] += num_logits - 1
        table.is_ahead = True
        placements: np.ndarray = table.placement[rows]
        return placements

    def must_wait(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool; rows that nothing can be planned for before a step in flight is taken in.

        They end by their length; or something depends on the token: a grammar, how many of the drafts are accepted, or
        the worker, which has it late; or a beam has sampled: all beams wait, so that those of a search sample together.
        """
        table = self._table
        pending, flags = table.num_pending[rows], table.flags[rows]
        must_wait: np.ndarray = table.lengths(rows) >= table.max_total_tokens[rows]
        must_wait |= pending > 0 if self._waits_for_tokens else (pending > 0) & ((flags & NEEDS_TOKEN) != 0)
        must_wait |= table.num_drafting[rows] > 0
        is_beam = (flags & _IS_BEAM) != 0
        if (pending[is_beam] > 0).any():
            must_wait |= is_beam
        return must_wait

    def leave_out(self, rows: np.ndarray, num_left: np.ndarray) -> None:
        """Take rows out of the step that is planned: those that must wait, and decoding ones beyond its share.

        Args:
            num_left: [num_rows] tokens to compute; those of rows that are left out become 0.
        """
        if self:
            num_left[self.must_wait(rows)] = 0
        if self._waits_for_tokens:
            self._leave_to_others(rows, num_left)

    def _leave_to_others(self, rows: np.ndarray, num_left: np.ndarray) -> None:
        """The steps behind this one need decoding rows as well; beams sample together."""
        is_decoding = (num_left == 1) & ((self._table.flags[rows] & _IS_BEAM) == 0)
        share = -(-len(rows) // self._depth)
        num_left[np.flatnonzero(is_decoding)[share:]] = 0

    def is_alive(self, step: Step) -> np.ndarray:
        """[num_reqs] bool; rows of a step that still belong to the request they did when it was scheduled."""
        if step.placements is None:
            is_alive: np.ndarray = self._table.handle[step.rows] == step.handles
        else:
            is_alive = self._table.placement[step.rows] == step.placements
        return is_alive

    def end(self, step: Step) -> None:
        """A step is taken in or abandoned; steps are, once each, in the order in which they were scheduled."""
        is_oldest = self._num_in_flight and step.output.step == self.num_steps - self._num_in_flight
        assert is_oldest, "a step is taken in once, and before those that were scheduled after it"
        self._num_in_flight -= 1
        if step.placements is not None:
            self._forget(step)

    def _forget(self, step: Step) -> None:
        """What the step was to compute and sample is known, or never was."""
        table, output, is_alive = self._table, step.output, self.is_alive(step)
        table.num_computing[step.rows[is_alive]] -= output.num_scheduled_tokens[is_alive]
        is_sampling = output.is_sampling
        sampling = step.rows[is_sampling][is_alive[is_sampling]]
        num_logits = output.num_logits()[is_alive[is_sampling]]
        table.num_pending[sampling] -= num_logits
        table.num_drafting[sampling] -= num_logits - 1
        table.is_ahead = self._num_in_flight > 0

    def free_again(self, step: Step) -> None:
        """The rows that an abandoned step freed go out again: the worker may not have freed them."""
        self._freed_rows = list(dict.fromkeys([*step.output.freed_rows.tolist(), *self._freed_rows]))
