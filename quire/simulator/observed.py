"""Steps as they really ran, read from a flight recording: what calibrations are fitted to, and traces to run again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ValidationError
from quire.flight_recorder.reader import Recording
from quire.flight_recorder.records import Add, Update
from quire.flight_recorder.replay import Replay
from quire.simulator.costs import StepShape, shape_of
from quire.simulator.workload import SimRequest


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step.

    Attributes:
        seconds: that it computed.
        gap_s: since the end of the step before, without `seconds`; None where the engine had been idle.
        end_s: on the recorded clock.
        handles: of its new tokens.
    """

    shape: StepShape
    seconds: float
    gap_s: float | None
    end_s: float
    handles: np.ndarray


@dataclass(frozen=True, slots=True)
class Observed:
    """A recording's steps, and its requests: handle -> (name, seconds at which it was queued)."""

    steps: list[StepSample]
    queued: dict[int, tuple[str, float]]


def observe(recording: Recording) -> Observed:
    """Steps of a recording.

    Raises:
        ValidationError: the recording does not replay.
    """
    steps: list[StepSample] = []
    last_end: float | None = None

    def note(scheduled: SchedulerOutput, call: Update, outputs: EngineCoreOutputs) -> None:
        nonlocal last_end
        if call.seconds is not None:
            gap_s = None if last_end is None else outputs.timestamp - last_end - call.seconds
            steps.append(StepSample(shape_of(scheduled), call.seconds, gap_s, outputs.timestamp, outputs.handles))
        is_idle = not outputs.stats.num_running + outputs.stats.num_waiting
        last_end = None if is_idle else outputs.timestamp

    result = Replay(recording, note).run()
    if result.first_difference is not None:
        step, what = result.first_difference
        raise ValidationError(f"the recording diverges at step {step}: {what}")
    queued = {
        call.request.handle: (call.request.request_id, call.clock[-1])
        for call in recording.calls()
        if isinstance(call, Add) and call.clock
    }
    return Observed(steps, queued)


def requests_of(recording: Recording) -> list[SimRequest]:
    """The requests of a recording that ended in it, to be simulated: with their own prompts, lengths and times.

    Raises:
        ValidationError: the recording does not replay, or nothing ended in it.
    """
    result = Replay(recording).run()
    calls = [call for call in recording.calls() if isinstance(call, Add) and not call.is_refused and call.clock]
    requests = []
    for call in calls:
        timeline = result.watch.timelines.get(call.request.handle)
        if timeline is None or timeline.ended_s is None or not timeline.num_output_tokens:
            continue
        message = call.request
        requests.append(
            SimRequest(
                arrival_s=call.clock[0] - calls[0].clock[0], prompt_len=len(message.prompt_token_ids),
                output_len=timeline.num_output_tokens, stream=message.handle, token_ids=message.prompt_token_ids,
                priority=message.priority,
            )
        )  # fmt: skip
    if not requests:
        raise ValidationError("no request both arrived and finished within the recording", field="trace")
    return requests
