"""Runs steps with drafts before there are requests: what they take on this machine, for the controller of drafts.

Called by the engine core's factory where drafts are configured and a controller decides. Owns nothing: the requests are
those of a scheduler of its own, which is gone afterwards, and the worker's rows are free again. What the steps write
lies in blocks that no request has yet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from quire.core.drafts import DraftRows, Proposals, SpeculatedStep, StepLoad, make_proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import NewBlocks, SchedulerOutput, StateBlocks
from quire.errors import ValidationError
from quire.executor.base import Executor
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.spec_decode.cost_table import MeasuredStep

# Requests at once, as far as that many may run, and seconds since the start after which no step of these is measured,
# but for the FEWEST that say by how much drafts make a step longer.
ROWS = {1: 0.07, 4: 0.12}
FEWEST = 2
# Drafts of each, in this order as often as there is time.
DRAFTS = (0, 4, 1, 16, 0, 2, 8, 32)
MOST_TURNS = 2
PROMPT_LEN = 8
OUTPUT_LEN = 96  # room for all turns and the most drafts behind them


def measure_steps(
    executor: Executor,
    setup: SchedulerSetup,
    most_drafts: int,
    want_drafts: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredStep]:
    """What steps took, as many as there was time for; those that were captured are left out.

    Args:
        most_drafts: of a row, at least 1.
        want_drafts: called for a step behind which a model is to draft; None = there is none.
        clock: seconds.
    """
    numbers = [number for number in DRAFTS if number <= most_drafts]
    start, measured = clock(), list[MeasuredStep]()
    for num_rows, limit_s in ROWS.items():
        if num_rows > (setup.scheduler.max_num_seqs or 1):
            break
        try:
            measurement = _Measurement(executor, setup, num_rows, want_drafts, clock)
        except ValidationError:
            break  # the KV cache is too small even for these
        found = measurement.run(numbers, start + limit_s)
        measured += found
        if len(found) < len(numbers):
            break  # steps are long, and so few trials are lost by what is not known
    return measured


class _Script:
    """Proposes and keeps as many drafts as it is set to: a `DraftProposer` and a `DraftController`.

    Attributes:
        num_drafts: of each row of the next step.
    """

    name = "scripted"
    num_drafts = 0

    def clock(self) -> float:
        """As `DraftController.clock`; it stands, as nothing is recorded."""
        return 0.0

    def begin(self, request: EngineCoreRequest) -> None:
        """As `DraftProposer`."""

    def propose(self, rows: DraftRows) -> Proposals:
        """Token 0, again and again: a draft that is wrong takes as long to verify."""
        return make_proposals([np.zeros(most, dtype=np.int32) for most in rows.max_tokens.tolist()])

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """As `DraftProposer`."""

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        """As `DraftController`."""
        return self.num_drafts

    def num_watched(self) -> int:
        """As `DraftController`."""
        return 0

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        """As `DraftController`."""

    def num_skipped(self) -> int:
        """As `DraftController`."""
        return 0

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        """As `DraftController`."""

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        """As `DraftController`."""
        return proposals.counts

    def record(self, step: SpeculatedStep) -> None:
        """As `DraftController`."""


class _Measurement:
    """Some requests that come together, and their steps."""

    def __init__(
        self,
        executor: Executor,
        setup: SchedulerSetup,
        num_rows: int,
        want_drafts: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._want_drafts = want_drafts
        self._clock = clock
        self._script = _Script()
        self._num_rows = num_rows
        of_drafts = dataclasses.replace(setup, has_proposer=True)
        self._scheduler: Scheduler = make_scheduler(of_drafts, proposer=self._script, controller=self._script)
        prompt_len = min(PROMPT_LEN, setup.max_model_len - 1)
        output_len = min(OUTPUT_LEN, setup.max_model_len - prompt_len)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        for handle in range(num_rows):
            self._scheduler.add_request(
                EngineCoreRequest(
                    handle=handle, request_id=f"measured-{handle}", sampling_params=params, seed=handle,
                    prompt_token_ids=np.arange(prompt_len, dtype=np.int32),
                )
            )  # fmt: skip

    def run(self, numbers: list[int], end_s: float) -> list[MeasuredStep]:
        """What steps with these numbers of drafts took, in turns, until the clock shows `end_s`."""
        found = list[MeasuredStep]()
        newest = self._step(0, found)  # the prompts
        for number in numbers * MOST_TURNS:
            if newest is None or (self._clock() >= end_s and len(found) >= FEWEST):
                break
            newest = self._step(number, found) or newest
        if newest is not None:
            self._executor.sample_tokens(self._executor.execute_model(_freeing(newest, self._num_rows)))
        return found

    def _step(self, num_drafts: int, found: list[MeasuredStep]) -> SchedulerOutput | None:
        """Run a step and add it to those that were measured; None = no request is left."""
        self._script.num_drafts = num_drafts
        start = self._clock()
        step = self._scheduler.schedule()
        if step is None:
            return None
        scheduled = step.output
        if num_drafts and self._want_drafts is not None:
            self._want_drafts()
        output = self._executor.sample_tokens(self._executor.execute_model(scheduled))
        self._scheduler.update_from_output(step, output)
        seconds = self._clock() - start
        if not scheduled.is_prefill.any() and not output.is_capture:
            found.append(_measured(scheduled, output, seconds))
        return scheduled


def _measured(scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float) -> MeasuredStep:
    num_drafts = 0 if scheduled.drafts is None else int(scheduled.drafts.counts.sum())
    return MeasuredStep(len(scheduled.rows), num_drafts, seconds - output.drafting_s, output.drafting_s)


def _freeing(newest: SchedulerOutput, num_rows: int) -> SchedulerOutput:
    """A step that computes nothing and frees the rows."""
    none = np.empty(0, dtype=np.int32)
    return dataclasses.replace(
        newest, step=newest.step + 1, freed_rows=np.arange(num_rows, dtype=np.int32), new_reqs=(),
        new_blocks=tuple(NewBlocks(none, none, none) for _ in newest.new_blocks),
        rows=none, num_scheduled_tokens=none, num_computed_tokens=none, is_prefill=none.astype(np.bool_),
        is_sampling=none.astype(np.bool_), total_num_scheduled_tokens=0, drafts=None,
        states=tuple(StateBlocks(none, none) for _ in newest.states),
    )  # fmt: skip
