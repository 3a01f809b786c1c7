"""One engine under a virtual clock: the real scheduler, with the durations that its steps would have.

Called by `fleet`. Owns the scheduler, the clock and the results of its requests. Steps are run one by one, as the
engine runs them: nothing is skipped, so whatever the scheduler does with a load it does here.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ValidationError
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.simulator.costs import CostModel, shape_of
from quire.simulator.drafts import AssumedDrafts, Speculation, num_right, places_in_rows
from quire.simulator.results import Results
from quire.simulator.workload import SimRequest, stream_tokens


class FrontEnd:
    """Takes in one request after the other: of those that come at once the first may be in a step before the last is
    queued.
    """

    def __init__(self, costs: CostModel) -> None:
        self._wait_s, self._each_s = costs.request_s, costs.request_each_s
        self._last_s = -np.inf

    def queued_s(self, arrival_s: float) -> float:
        """When a request that a client sends at `arrival_s` is queued; requests come in the order of their arrival."""
        self._last_s = max(arrival_s + self._wait_s, self._last_s + self._each_s)
        return self._last_s


class Replica:
    """An engine that serves requests given in the order of their arrival.

    Args:
        front_end: where its requests come in.
        speculation: what is assumed of drafts; None = there are none.

    Attributes:
        now_s: the virtual clock.
        results: what became of the requests, by their numbers.
        num_unfinished: requests that were submitted and have not ended.
        capacity_tokens: that its KV cache holds.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        costs: CostModel,
        front_end: FrontEnd,
        capacity: int,
        speculation: Speculation | None = None,
    ) -> None:
        self.now_s = 0.0
        self.results = Results(capacity)
        self._costs = costs
        self._front_end = front_end
        self._has_cache = setup.cache.enable_prefix_caching  # without it tokens are not read
        proposer = None if speculation is None else AssumedDrafts(speculation, self._tokens_of)
        setup = dataclasses.replace(setup, has_proposer=proposer is not None)
        self._scheduler = make_scheduler(setup, lambda: self.now_s, proposer=proposer)
        self._arrivals: deque[tuple[float, int, SimRequest]] = deque()
        self._streams = np.zeros(capacity, dtype=np.int64)
        self._row_streams = np.zeros(setup.scheduler.max_num_seqs or 1, dtype=np.int64)
        self._params: dict[int, SamplingParams] = {}  # to check new ones each time would take as long as to serve
        self.num_unfinished = 0
        self.capacity_tokens = setup.kv_cache.pool_sizes()[0].num_blocks * setup.kv_cache.block_size

    def submit(self, number: int, request: SimRequest) -> None:
        """A client sends a request; it is queued after the front-end's time for it."""
        self._arrivals.append((self._front_end.queued_s(request.arrival_s), number, request))
        self.results.sent(number, request.arrival_s, request.prompt_len)
        self.num_unfinished += 1

    def run_until(self, time_s: float) -> None:
        """Run every step that begins before `time_s`."""
        while self.now_s < time_s:
            self._take_in()
            if not self._scheduler.has_unfinished_requests():
                if not self._arrivals or self._arrivals[0][0] >= time_s:
                    return
                self.now_s = max(self.now_s, self._arrivals[0][0])
                continue
            if not self._step():
                if not self._arrivals:
                    raise AssertionError("requests are left, but none is scheduled or due to arrive")
                self.now_s = max(self.now_s, self._arrivals[0][0])

    def finish(self) -> None:
        """Run until nothing is left."""
        self.run_until(float("inf"))

    def _take_in(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            _, number, request = self._arrivals.popleft()
            self._streams[number] = request.stream
            try:
                self._scheduler.add_request(self._message(number, request))
            except ValidationError as error:
                self.results.refused(number, error.message)
                self.num_unfinished -= 1

    def _step(self) -> bool:
        step = self._scheduler.schedule()
        if step is None:
            return False
        shape = shape_of(step.output)
        seconds = self._costs.step_seconds(shape)
        self.now_s += seconds + self._costs.gap_seconds(shape)
        outputs = self._scheduler.update_from_output(step, self._sample(step.output), seconds)
        self._note(outputs, shape.num_tokens)
        return True

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """The next token of each stream, and one more after each draft that is right."""
        rows = scheduled.rows[scheduled.is_sampling]
        for new in scheduled.new_reqs if self._has_cache else ():
            self._row_streams[new.row] = self._streams[int(new.request_id)]
        positions = (scheduled.num_computed_tokens + scheduled.num_scheduled_tokens)[scheduled.is_sampling]
        streams, drafts = self._row_streams[rows], scheduled.drafts
        if drafts is None:
            return ModelRunnerOutput(rows=rows, sampled_token_ids=self._tokens(streams, positions))
        counts = drafts.counts[scheduled.is_sampling]
        positions = positions - counts
        num_sampled = 1 + num_right(self._runs(streams, positions, counts) == drafts.token_ids, counts)
        starts = np.concatenate([[0], np.cumsum(num_sampled)]).astype(np.int32)
        token_ids = self._runs(streams, positions, num_sampled)
        return ModelRunnerOutput(rows=rows, sampled_token_ids=token_ids, sampled_start_loc=starts)

    def _runs(self, streams: np.ndarray, positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """[sum of counts] so many tokens of each stream from its position on."""
        return self._tokens(np.repeat(streams, counts), np.repeat(positions, counts) + places_in_rows(counts))

    def _tokens(self, streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if not self._has_cache:
            return np.ones(len(streams), dtype=np.int32)
        return stream_tokens(streams, positions)

    def _tokens_of(self, handles: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._tokens(self._streams[handles], positions)

    def _note(self, outputs: EngineCoreOutputs, num_tokens: int) -> None:
        told_s = self.now_s + self._costs.delivery_seconds(len(outputs.handles))
        if outputs.drafts is None:
            self.results.delivered(outputs.handles, told_s)
        else:
            handles, counts = np.unique(outputs.handles, return_counts=True)
            self.results.delivered(handles, told_s, counts)
        for end in outputs.finished:
            self.results.finished(end.handle, told_s)
        self.num_unfinished -= len(outputs.finished)
        self.results.stepped(outputs.stats, num_tokens)

    def _message(self, number: int, request: SimRequest) -> EngineCoreRequest:
        params = self._params.get(request.output_len)
        if params is None:
            params = SamplingParams(max_tokens=request.output_len, ignore_eos=True, temperature=0.0, detokenize=False)
            self._params[request.output_len] = params
        return EngineCoreRequest(
            handle=number,
            request_id=str(number),
            prompt_token_ids=request.prompt() if self._has_cache else np.ones(request.prompt_len, dtype=np.int32),
            sampling_params=params,
            seed=number,
            arrival_time=request.arrival_s,
            priority=request.priority,
        )
