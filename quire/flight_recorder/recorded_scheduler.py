"""RecordedScheduler: a scheduler whose every call is recorded, with what it read besides: the clock, and outside gates.

Stands in the engine core in the scheduler's place when there is a flight recorder. Decides nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import numpy as np

from quire.core.drafts import DraftController, DraftProposer
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.live_state import EngineState
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import QuireError
from quire.flight_recorder import records, snapshot
from quire.flight_recorder.privacy import as_recorded
from quire.flight_recorder.writer import RecordWriter
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.scheduler.admission import AdmissionGate, Candidate, GateDecision
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.live_state import live_state
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.scheduler.step import Step
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.waiting import Blocked


class RecordingClock:
    """A clock that keeps its readings until they are taken."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._readings: list[float] = []

    def __call__(self) -> float:
        """Seconds."""
        reading = self._clock()
        self._readings.append(reading)
        return reading

    def take(self) -> list[float]:
        """The readings since the last call."""
        readings, self._readings = self._readings, []
        return readings


class RecordedScheduler(SchedulerInterface):
    """A scheduler and its recorder.

    Args:
        setup: what the scheduler is made from.
        make_writer: makes the writer; given the clock.
        gates: further reasons for which a waiting request must wait.
        clock: seconds.
        proposer: of draft tokens; None = there are none.
        controller: says how many of them to verify; None = all.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        make_writer: Callable[[Callable[[], float]], RecordWriter],
        gates: Sequence[AdmissionGate] = (),
        clock: Callable[[], float] = time.monotonic,
        proposer: DraftProposer | None = None,
        controller: DraftController | None = None,
    ) -> None:
        self._clock = RecordingClock(clock)
        self._verdicts: list[str] = []
        self._num_in_flight = 0
        noted_gates = [self._noted(gate) for gate in gates]
        self._scheduler = make_scheduler(setup, self._clock, noted_gates, proposer, controller=controller)
        self._writer = make_writer(clock)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        try:
            self._scheduler.add_request(request)
        except QuireError:
            self._writer.put(partial(_add, request, True, self._clock.take()))
            raise
        self._writer.put(partial(_add, request, False, self._clock.take()))

    def finish_requests(
        self, handles: Iterable[int], reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> None:
        """End requests from outside, in any state; unknown and finished handles are ignored."""
        handles = list(handles)
        self._scheduler.finish_requests(handles, reason, error, error_field)
        self._writer.put(partial(records.Finish, handles, reason, error, self._clock.take(), error_field))

    def hold(self, handles: Collection[int]) -> None:
        """From now on these requests sit out the steps, and no others."""
        held = sorted(handles)
        self._scheduler.hold(held)
        self._writer.put(partial(records.Hold, held, self._clock.take()))

    def schedule(self) -> Step | None:
        """Decide the next step; None when no request can compute."""
        step = self._scheduler.schedule()
        self._num_in_flight += step is not None
        verdicts, self._verdicts = self._verdicts, []
        scheduled = None if step is None else step.output
        self._writer.put(partial(_schedule, scheduled, verdicts, self._clock.take()))
        return step

    def update_from_output(
        self, step: Step, output: ModelRunnerOutput, seconds: float | None = None
    ) -> EngineCoreOutputs:
        """Take in the step's tokens."""
        token_ids = np.array(output.sampled_token_ids)  # the worker may write there again
        logprobs = copy.deepcopy(output.logprobs) if self._scheduler.reads_logprobs else None
        outputs = self._scheduler.update_from_output(step, output, seconds)
        self._num_in_flight -= 1
        self._writer.put(partial(_update, token_ids, seconds, output, outputs, self._clock.take(), logprobs))
        if self._writer.wants_state or self._writer.needs_state:
            self._begin_file()
        return outputs

    def abandon_step(self, step: Step) -> list[int]:
        """A step failed: it never was."""
        handles = self._scheduler.abandon_step(step)
        self._num_in_flight -= 1
        self._writer.put(partial(records.Abandon, self._clock.take()))
        return handles

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Ends and events that happened outside a step (aborts); None when there are none."""
        outputs = self._scheduler.take_outputs()
        readings = self._clock.take()
        if outputs is not None:
            self._writer.put(partial(_take, outputs, readings))
        if self._writer.needs_state:
            self._begin_file()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return self._scheduler.has_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self._scheduler.get_request_counts()

    def watch_blocks(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` which blocks can be found, from now on; a replay reports to none."""
        self._scheduler.watch_blocks(recorder)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        is_done = self._scheduler.reset_prefix_cache(reset_running_requests)
        self._writer.put(partial(records.Reset, is_done, self._clock.take(), reset_running_requests))
        return is_done

    def live_state(self, blocked: Blocked | None) -> EngineState:
        """As `scheduler.live_state`; nothing is recorded, as nothing changes."""
        return live_state(self._scheduler, blocked)

    def close(self) -> None:
        """Write what is left; harmless when repeated."""
        self._writer.close()

    def _noted(self, gate: AdmissionGate) -> AdmissionGate:
        def ask(candidate: Candidate, plan: StepPlan) -> GateDecision:
            verdict = gate(candidate, plan)
            self._verdicts.append(verdict.name)
            return verdict

        return ask

    def _begin_file(self) -> None:
        """Between two steps: nothing is in flight. Waits for an idle moment while there is time."""
        if self._num_in_flight:
            return
        if self._scheduler.has_unfinished_requests() and not self._writer.needs_state:
            return
        try:
            state = snapshot.freeze(self._scheduler)
        except snapshot.SnapshotError as error:
            self._writer.give_up(error.message)
            return
        self._writer.begin_file(state)


def _add(request: EngineCoreRequest, is_refused: bool, clock: list[float]) -> records.Record:
    return records.Add(as_recorded(request), is_refused, clock)


def _schedule(scheduled: SchedulerOutput | None, verdicts: list[str], clock: list[float]) -> records.Record:
    if all(one == GateDecision.GO.name for one in verdicts):
        verdicts = []
    if scheduled is None:
        return records.Schedule(False, None, None, 0, verdicts, clock)
    digest = records.digest_of_schedule(scheduled)
    num_tokens = scheduled.num_scheduled_tokens
    return records.Schedule(True, scheduled.rows, num_tokens, digest, verdicts, clock, records.drafts_by_row(scheduled))


def _update(
    token_ids: np.ndarray,
    seconds: float | None,
    output: ModelRunnerOutput,
    outputs: EngineCoreOutputs,
    clock: list[float],
    logprobs: LogprobsArrays | None,
) -> records.Record:
    digest = records.digest_of_outputs(outputs)
    return records.Update(token_ids, seconds, records.rest_of(output), digest, clock, logprobs)


def _take(outputs: EngineCoreOutputs, clock: list[float]) -> records.Record:
    return records.Take(records.digest_of_outputs(outputs), clock)
