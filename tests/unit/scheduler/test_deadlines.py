"""Queue deadlines: a request that waits too long for its first row ends, and one that has run never does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.engine_messages import FinishReason
from quire.scheduler.scheduler import Scheduler
from tests.unit.scheduler.harness import Engine, expected_answer, make_kv_cache_config, make_request


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_with(clock: Clock, num_blocks: int = 40, max_num_seqs: int = 1, policy: str = "fcfs") -> Engine:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=max_num_seqs, scheduling_policy=policy)
    cache = CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0)
    return Engine(Scheduler(config, cache, make_kv_cache_config(num_blocks, 4), 100, clock=clock))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "shortest"])
def test_one_that_has_waited_longer_ends_in_the_next_step_with_the_reason(policy):
    clock = Clock()
    engine = engine_with(clock, policy=policy)
    engine.add(make_request(0, max_tokens=50), make_request(1, 9, max_tokens=60, queue_timeout_s=2.0))
    engine.step()
    clock.now = 2.0
    engine.step()
    assert 1 not in engine.finished, "not before its time"
    clock.now = 2.1
    engine.step()
    end = engine.finished[1]
    assert end.finish_reason is FinishReason.QUEUE_TIMEOUT and str(end.finish_reason) == "queue_timeout"
    assert end.error == "not admitted within queue_timeout=2 s" and engine.tokens[1] == []
    assert engine.scheduler.get_request_counts() == (1, 0)
    engine.run()
    assert len(engine.tokens[0]) == 50


def test_one_that_has_started_is_never_ended_by_it_even_when_it_waits_again():
    clock = Clock()
    engine = engine_with(clock, num_blocks=14, max_num_seqs=3)
    requests = [make_request(handle, 8, max_tokens=30, queue_timeout_s=1.0) for handle in range(3)]
    engine.add(*requests)
    for _ in range(300):
        clock.now += 0.5
        if engine.step() is None:
            break
    assert engine.num_preemptions > 0
    for request in requests:
        assert engine.tokens[request.handle] == expected_answer(request, 100)[0]


def test_one_that_ran_on_another_core_has_started():
    clock = Clock()
    engine = engine_with(clock)
    answer = expected_answer(make_request(1, 5, max_tokens=6), 100)[0]
    continued = dataclasses.replace(
        make_request(1, 5, max_tokens=6, queue_timeout_s=1.0), output_token_ids=np.array(answer[:2], dtype=np.int32)
    )
    engine.add(make_request(0, max_tokens=40), continued)
    for _ in range(60):
        clock.now += 1.0
        engine.step()
    assert engine.tokens[1] == answer[2:]


def test_one_that_was_aborted_or_has_no_deadline_is_left_alone():
    clock = Clock()
    engine = engine_with(clock)
    engine.add(make_request(0, max_tokens=9), make_request(1, queue_timeout_s=1.0), make_request(2))
    engine.abort(1)
    clock.now = 1e6
    engine.run()
    assert engine.finished[1].finish_reason is FinishReason.ABORT
    assert len(engine.tokens[2]) == 4
    assert not engine.scheduler._requests._deadlines
