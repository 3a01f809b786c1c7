"""Runs a recording again: the same scheduler, the same calls, no model; says whether it decides the same.

Called by `quire replay` and tests. Owns the scheduler it runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import MessageError, QuireError
from quire.flight_recorder import records
from quire.flight_recorder.reader import Recording
from quire.flight_recorder.recorded_drafts import RecordedDrafts
from quire.flight_recorder.records import Abandon, Add, Call, Finish, Hold, Schedule, Take, Update
from quire.flight_recorder.restoring import restore
from quire.flight_recorder.waits import WaitWatch
from quire.scheduler.admission import Candidate, GateDecision
from quire.scheduler.setup import make_scheduler
from quire.scheduler.step import Step
from quire.scheduler.step_plan import StepPlan


class Difference(Exception):
    """The replay went another way than the recording; says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """How a replay went.

    Attributes:
        num_steps: compared, all equal.
        first_difference: the number of the step that differs, counted from the start of the recording, and how; None =
            the schedule is identical.
        seconds: that the replay took.
        watch: where the time of requests went.
    """

    num_steps: int
    num_calls: int
    first_difference: tuple[int, str] | None
    seconds: float
    watch: WaitWatch


OnStep = Callable[[SchedulerOutput, Update, EngineCoreOutputs], None]


class Replay:
    """One run of a recording.

    Args:
        on_step: called with every step that was taken in.

    Raises:
        MessageError: the state at its beginning cannot be restored.
    """

    def __init__(self, recording: Recording, on_step: OnStep | None = None) -> None:
        self._recording = recording
        self._on_step = on_step
        self._readings: Iterator[float] = iter(())
        self._verdicts: Iterator[str] | None = None
        self._drafts = RecordedDrafts()
        drafts = self._drafts if recording.head.setup.has_proposer else None
        self._scheduler = make_scheduler(
            recording.head.setup, self._read_clock, (self._gate,), drafts, controller=drafts
        )
        if recording.head.state is not None:
            restore(self._scheduler, recording.head.state)
        self._watch = WaitWatch()
        self._watch_restored()
        self._in_flight: deque[Step] = deque()
        self._last_rows = np.empty(0, dtype=np.int32)
        self._cause = ""

    def _watch_restored(self) -> None:
        """Watch the requests of the restored state."""
        scheduler = self._scheduler
        try:
            for message in [*scheduler.unplaced_requests(), *(one for _, one in scheduler.placed_requests())]:
                self._watch.knows(message)
        except Exception as error:  # the parts of a foreign state need not fit together
            raise MessageError(f"the recorded state is inconsistent: {type(error).__name__}: {error}") from None

    def run(self) -> ReplayResult:
        """Run all of it, or up to the first difference."""
        start, difference = time.perf_counter(), None
        self._watch.advance(self._recording.head.clock)
        num_calls = 0
        try:
            for call in self._recording.calls():
                self._run_call(call)
                num_calls += 1
        except Difference as error:
            difference = self._watch.num_steps, str(error)
        return ReplayResult(
            num_steps=self._watch.num_steps, num_calls=num_calls, first_difference=difference,
            seconds=time.perf_counter() - start, watch=self._watch,
        )  # fmt: skip

    def _run_call(self, call: Call) -> None:
        if call.clock:
            self._watch.advance(call.clock[0])
        self._readings = iter(call.clock)
        try:
            self._dispatch(call)
        except (Difference, MessageError):
            raise
        except Exception as error:  # with another input the scheduler's own checks may be what finds it
            raise Difference(f"the scheduler failed: {type(error).__name__}: {error}") from error
        if next(self._readings, None) is not None:
            raise Difference("the clock was read fewer times than recorded")
        if call.clock:
            self._watch.advance(call.clock[-1])

    def _dispatch(self, call: Call) -> None:
        if isinstance(call, Schedule):
            self._schedule(call)
        elif isinstance(call, Update):
            self._update(call)
        elif isinstance(call, Add):
            self._add(call)
        elif isinstance(call, Finish):
            self._scheduler.finish_requests(call.handles, call.reason, call.error, call.error_field)
        elif isinstance(call, Hold):
            self._scheduler.hold(call.handles)
        elif isinstance(call, Abandon):
            self._scheduler.abandon_step(self._next_step())
            self._cause = "its step failed, and all running requests were restarted"
        elif isinstance(call, Take):
            outputs = self._scheduler.take_outputs()
            self._compare("the outputs sent to the front end", call.digest, records.digest_of_outputs(outputs))
            self._watch.told(outputs, self._cause)
        else:
            is_done = self._scheduler.reset_prefix_cache(call.reset_running_requests)
            self._compare("whether the prefix cache was reset", int(call.is_done), int(is_done))
            if call.reset_running_requests:
                self._cause = "the prefix cache was reset, and all running requests were restarted"

    def _add(self, call: Add) -> None:
        try:
            self._scheduler.add_request(call.request)
        except QuireError as error:
            if not call.is_refused:
                raise Difference(f"request {call.request.request_id} is refused: {error.message}") from None
            return
        if call.is_refused:
            raise Difference(f"request {call.request.request_id} is not refused")
        self._watch.added(call.request)

    def _schedule(self, call: Schedule) -> None:
        self._verdicts = iter(call.verdicts) if call.verdicts else None
        self._drafts.expect(self._last_rows if call.rows is None else call.rows, call.drafts)
        step = self._scheduler.schedule()
        self._compare_plan(call, None if step is None else step.output)
        self._cause = "not enough KV blocks for requests of higher rank"
        if step is not None:
            self._in_flight.append(step)
            if step.made_room:
                names = ", ".join(new.request_id for new in step.output.new_reqs)
                self._cause = f"preempted for {names or 'a waiting request'} of a higher class"
        self._watch.scheduled(self._scheduler, step)

    def _next_step(self) -> Step:
        if not self._in_flight:
            raise Difference("a step was updated or abandoned that was not scheduled")
        return self._in_flight.popleft()

    def _update(self, call: Update) -> None:
        step = self._next_step()
        scheduled = step.output
        output = records.whole_output(call, scheduled)
        starts = output.sampled_start_loc
        num_sampled = int(scheduled.is_sampling.sum()) if starts is None else int(starts[-1])
        self._compare("the number of sampled tokens", len(call.token_ids), num_sampled)
        outputs = self._scheduler.update_from_output(step, output, call.seconds)
        found = records.digest_of_outputs(outputs)
        self._compare("the outputs sent to the front end (tokens, finishes, times)", call.digest, found)
        self._watch.told(outputs, self._cause)
        if self._on_step is not None:
            self._on_step(scheduled, call, outputs)

    def _compare_plan(self, call: Schedule, scheduled: SchedulerOutput | None) -> None:
        if scheduled is None or not call.is_step:
            self._compare("whether there is a step", int(call.is_step), int(scheduled is not None))
            return
        rows = self._last_rows if call.rows is None else call.rows
        num_tokens = np.ones(len(rows), dtype=np.int32) if call.num_tokens is None else call.num_tokens
        self._last_rows = rows
        if not np.array_equal(rows, scheduled.rows):
            raise Difference(f"rows {rows.tolist()} were recorded, {scheduled.rows.tolist()} are scheduled")
        if not np.array_equal(num_tokens, scheduled.num_scheduled_tokens):
            found = scheduled.num_scheduled_tokens.tolist()
            raise Difference(f"{num_tokens.tolist()} tokens by row were recorded, {found} are scheduled")
        self._compare("the step's blocks or messages", call.digest, records.digest_of_schedule(scheduled))

    def _compare(self, what: str, recorded: int, found: int) -> None:
        if recorded != found:
            raise Difference(f"{what} differs: recorded {recorded}, got {found}")

    def _read_clock(self) -> float:
        reading = next(self._readings, None)
        if reading is None:
            raise Difference("the clock was read more often than recorded")
        return reading

    def _gate(self, candidate: Candidate, plan: StepPlan) -> GateDecision:
        if self._verdicts is None:
            return GateDecision.GO
        verdict = next(self._verdicts, None)
        if verdict is None or verdict not in GateDecision.__members__:
            raise Difference("a gate was asked more often than recorded")
        return GateDecision[verdict]
