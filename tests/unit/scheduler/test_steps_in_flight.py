"""Several steps in flight: results arrive late, after the steps behind them were scheduled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.step import Step
from tests.unit.scheduler.harness import (
    EOS,
    Engine,
    check_invariants,
    expected_answer,
    make_beams,
    make_request,
    make_scheduler,
)
from tests.unit.scheduler.pretended_model import Guesses
from tests.unit.scheduler.test_properties import (
    EXAMPLES,
    BeamSpec,
    check_answers,
    play,
    scheduler_settings,
    scripts,
)


@dataclass
class LateEngine(Engine):
    """The worker runs each step when it is scheduled, but its results are taken in up to `depth` - 1 steps later."""

    depth: int = 2
    in_flight: deque[tuple[Step, ModelRunnerOutput]] = field(default_factory=deque)

    def step(self, abort_in_flight: Sequence[int] = ()) -> SchedulerOutput | None:
        """Schedule a step; take in the oldest when no more may be in flight, or nothing could be scheduled."""
        step = self.scheduler.schedule()
        check_invariants(self.scheduler, self.groups)
        if step is not None:
            self.scheduled.append(step.output)
            self.in_flight.append((step, self.worker.execute(step.output)))
        self.abort(*abort_in_flight)
        check_invariants(self.scheduler, self.groups)
        if len(self.in_flight) == self.depth or (step is None and self.in_flight):
            self.take_in()
        elif step is None:
            self.receive(self.scheduler.take_outputs())
        return None if step is None else step.output

    def take_in(self) -> None:
        step, output = self.in_flight.popleft()
        self.receive(self.scheduler.update_from_output(step, output, self.duration(step.output)))
        check_invariants(self.scheduler, self.groups)
        self.consumer.check()

    def drain(self) -> None:
        while self.in_flight:
            self.take_in()

    def run(self, max_steps: int = 4000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.drain()
                self.step()
                return
            was_waiting = bool(self.in_flight)
            assert self.step() is not None or was_waiting, "requests are left, but nothing is scheduled"
        raise AssertionError("the requests do not end")

    def fail_step(self) -> None:
        """The step that is scheduled fails; those before it are taken in, as the worker had executed them."""
        step = self.scheduler.schedule()
        check_invariants(self.scheduler, self.groups)
        if step is None:
            return
        self.worker.spoil(step.output)
        self.drain()
        self.scheduler.abandon_step(step)
        check_invariants(self.scheduler, self.groups)


def make_engine(depth: int = 2, **options: Any) -> LateEngine:
    return LateEngine(make_scheduler(max_steps_in_flight=depth, **options), depth=depth)


def test_a_row_computes_its_next_token_while_the_one_before_is_not_known():
    engine = make_engine()
    request = make_request(0, 5, max_tokens=4)
    engine.add(request)
    first, second, third = engine.step(), engine.step(), engine.step()
    assert first is not None and second is not None and third is not None
    assert [int(step.num_computed_tokens[0]) for step in (first, second, third)] == [0, 5, 6]
    assert len(engine.tokens[0]) == 2
    engine.run()
    assert engine.tokens[0] == expected_answer(request, 100)[0]
    assert len(engine.scheduled) == 4, "no step is scheduled behind the last token"


def test_a_stop_that_is_found_late_drops_the_token_behind_it():
    engine = make_engine()
    request = next(
        one
        for one in (make_request(handle, 3, max_tokens=50, ignore_eos=False) for handle in range(300))
        if expected_answer(one, 100)[0][-1] == EOS and 3 < len(expected_answer(one, 100)[0]) < 20
    )
    engine.add(request)
    engine.run()
    answer, end = expected_answer(request, 100)
    assert (engine.tokens[request.handle], engine.finished[request.handle]) == (answer, end)
    assert len(engine.scheduled) == len(answer) + 1


def test_a_row_that_was_given_to_another_request_takes_nothing_that_was_in_flight_for_the_first():
    engine = make_engine(max_num_seqs=1)
    first, second = make_request(0, 5, max_tokens=9), make_request(1, 6, max_tokens=5)
    engine.add(first, second)
    engine.step()
    engine.step()
    engine.abort(0)
    engine.run()
    assert engine.tokens[0] == expected_answer(first, 100)[0][:1]
    assert engine.tokens[1] == expected_answer(second, 100)[0]


def test_rows_whose_tokens_the_worker_has_late_wait_and_share_the_steps():
    """As with pipeline stages: while one half of the rows is computed, the other half is scheduled."""
    scheduler = make_scheduler(max_steps_in_flight=2, waits_for_tokens=True, max_num_seqs=8)
    engine = LateEngine(scheduler, depth=2)
    requests = [make_request(handle, 3 + handle, max_tokens=9) for handle in range(5)]
    engine.add(*requests)
    rows_in_flight = []
    while scheduler.has_unfinished_requests():
        waiting = [set(step.rows[step.output.is_sampling].tolist()) for step, _ in engine.in_flight]
        output = engine.step()
        if output is not None:
            assert not set(output.rows.tolist()) & set().union(*waiting), "no row goes on before its token is known"
            rows_in_flight.append(len(output.rows) + sum(map(len, waiting)))
    engine.drain()
    assert all(engine.tokens[request.handle] == expected_answer(request, 100)[0] for request in requests)
    assert rows_in_flight.count(5) > len(rows_in_flight) / 2, "nearly always all rows are under way"


def test_more_steps_than_the_depth_are_refused():
    scheduler = make_scheduler(max_steps_in_flight=2)
    scheduler.add_request(make_request(0, max_tokens=9))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="taken in before the next one is scheduled"):
        scheduler.schedule()


def test_beams_wait_for_their_tokens_and_others_do_not():
    engine = make_engine()
    spec, request = BeamSpec(num_beams=2), make_request(9, 4, max_tokens=6)
    engine.add(*make_beams((0, 1), [5, 6, 7], spec, max_tokens=6), request)
    engine.run()
    assert engine.tokens[9] == expected_answer(request, 100)[0]
    assert any(len(step.rows) == 1 for step in engine.scheduled)


def test_a_request_that_is_preempted_for_a_beam_that_waits_keeps_what_was_in_flight():
    """The beam is first in rank and waits for its sibling; the request outgrows what is left, again and again."""
    engine = make_engine(
        depth=3, scheduling_policy="shortest", num_blocks=10, max_num_seqs=4, budget=43, watermark=0.2,
        long_prefill_token_threshold=10, reserve_full_prompt=True, max_model_len=40,
    )  # fmt: skip
    prompt = [3, 3, 3, 1, 1, 3, 2, 3, 1, 1, 2, 2, 2]
    requests = [make_request(handle, prompt, max_tokens=20, fork_group=1) for handle in range(1, 5)]
    engine.add(*requests)
    for _ in range(4):
        engine.step()
    engine.add(
        *make_beams((5, 6), [3, 3, 3, 2, 3, 1, 3, 3, 1, 3, 2, 2, 3], BeamSpec(num_beams=2), max_tokens=3, priority=-1)
    )
    engine.run()
    assert all(engine.tokens[request.handle] == expected_answer(request, 40)[0] for request in requests)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    scheduler_settings(),
    scripts(),
    st.sampled_from(["fcfs", "priority", "fair", "shortest"]),
    st.sampled_from([None, Guesses()]),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_however_late_results_are_every_request_ends_with_its_own_answer(config, script, policy, proposer, depth, late):
    config = {
        **config, "scheduling_policy": policy, "proposer": proposer, "max_steps_in_flight": depth,
        "waits_for_tokens": late,
    }  # fmt: skip
    engine, accepted = play(config, script, lambda scheduler, **options: LateEngine(scheduler, depth=depth, **options))
    check_answers(engine, accepted)
    assert engine.scheduler.get_request_counts() == (0, 0)
    assert engine.scheduler._kv.usage == 0.0
    assert engine.scheduler.reset_prefix_cache()
