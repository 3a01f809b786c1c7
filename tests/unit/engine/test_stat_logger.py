from __future__ import annotations

import dataclasses
import logging

import numpy as np

from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.speculation_stats import BucketStats, ControllerStats, Reason, SpeculationStats
from quire.core.stats import SchedulerStats
from quire.engine.stat_logger import StatLogger


def step(num_tokens: int, **stats: float) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.arange(num_tokens),
        new_token_ids=np.zeros(num_tokens, dtype=np.int32),
        logprobs=None,
        prompt_logprobs=(),
        finished=(),
        events=(),
        stats=SchedulerStats(**stats),  # type: ignore[arg-type]
        timestamp=0.0,
    )


def test_one_line_sums_up_the_steps_of_a_window(caplog):
    now = [0.0]
    stats = StatLogger(clock=lambda: now[0], interval_s=10.0)
    with caplog.at_level(logging.INFO):
        stats.record(step(2, num_scheduled_tokens=100, prefix_cache_queries=50, prefix_cache_hits=10))
        assert not caplog.messages
        now[0] = 20.0
        stats.record(step(2, num_scheduled_tokens=100, num_running=3, kv_cache_usage=0.5, num_preemptions=1))
        now[0] = 25.0
        stats.record(step(9, num_scheduled_tokens=9))
    assert caplog.messages == [
        "10 tokens/s computed, 0 tokens/s generated, 3 running, 0 waiting, 1 preemptions, "
        "KV cache 50.0% used, prefix cache hits 20.0%"
    ]


def test_the_last_steps_before_a_pause_get_a_line_and_idle_time_thins_out_no_rate(caplog):
    now = [0.0]
    stats = StatLogger(clock=lambda: now[0], interval_s=10.0)
    with caplog.at_level(logging.INFO):
        stats.flush()
        assert not caplog.messages, "nothing happened"
        now[0] = 1000.0
        stats.record(step(20, num_scheduled_tokens=20))
        now[0] = 1005.0
        stats.flush()
        stats.flush()
        now[0] = 2000.0
        stats.record(step(1, num_scheduled_tokens=1))
    assert [message.split(",")[0] for message in caplog.messages] == ["4 tokens/s computed"]


def test_drafts_have_a_line_of_their_own(caplog):
    now = [0.0]
    stats = StatLogger(clock=lambda: now[0], interval_s=10.0)
    outcomes = DraftOutcomes(np.arange(2), np.array([3, 3], np.int32), np.array([3, 1], np.int32))
    with caplog.at_level(logging.INFO):
        stats.record(dataclasses.replace(step(6), drafts=outcomes))
        now[0] = 2.0
        stats.record(dataclasses.replace(step(2), drafts=outcomes))
        stats.flush()
        assert caplog.messages[1:] == [
            "drafts: mean acceptance length 3.00, 6 tokens/s drafted, 4 tokens/s accepted (66.7%), "
            "by position 1.00, 0.50, 0.50"
        ]
        stats.record(step(1))
        stats.flush()
    assert len(caplog.messages) == 3, "the next window has no drafts"


def decided(num_drafted: int, num_closed: int, *closed: str) -> SpeculationStats:
    reasons = {Reason.DRAFTED: num_drafted, Reason.CLOSED: num_closed, Reason.PROBE: 0}
    buckets = tuple(BucketStats(name, 0.9, is_closed=True, num_closings=1) for name in closed)
    return SpeculationStats(
        controller=ControllerStats(
            reasons, num_proposed=10 * num_drafted, proposing_s=num_drafted / 1000, buckets=buckets
        )
    )


def test_what_was_decided_about_drafts_has_a_line_also_where_none_were_made(caplog):
    stats = StatLogger(clock=lambda: 0.0)
    with caplog.at_level(logging.INFO):
        for told in (decided(4, 1), decided(4, 9, "rows<=8 length>=0")):
            stats.record(dataclasses.replace(step(6), speculation=told))
            stats.flush()
        stats.record(step(1))
        stats.flush()
    assert [line for line in caplog.messages if line.startswith("drafts")] == [
        "drafts: steps 4 drafted, 1 closed; 40 tokens proposed in 4 ms; closed to drafts: no load",
        "drafts: steps 8 closed; 0 tokens proposed in 0 ms; closed to drafts: rows<=8 length>=0",
    ]
