"""Metrics of several processes as those of one."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.sampling_params import SamplingParams
from quire.core.stats import RequestStateStats, SchedulerStats
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.family_sums import ADDED_TYPES, Family, SummedTotals, families_of, merged, page_of
from tests.server.engines import scripted_config
from tests.unit.engine.test_front_end_parts import step


def process(requests: range, steps: int) -> EngineMetrics:
    """What a process counts that ended some requests, and of which so many steps were counted."""
    metrics = EngineMetrics(scripted_config(max_model_len=100), "m")
    for number in range(steps):
        metrics.record_step(step([1, 2], stats=SchedulerStats(num_running=3, num_scheduled_tokens=4 + number)))
    for number in requests:
        stats = RequestStateStats(num_generation_tokens=4, first_token_ts=1.0, first_token_latency=0.1 * number)
        metrics.record_request(stats, SamplingParams(), 5, 1, 4)
        metrics.record_tokens(0.01, 3)
    return metrics


def families(metrics: EngineMetrics) -> list[Family]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(families_of(metrics.all_series())), type=list[Family])


def value(of: list[Family], name: str, **labels: str) -> float:
    found = [
        one for family in of for sample, at, one in family.samples if sample == name and labels.items() <= at.items()
    ]
    return sum(found)


def test_what_front_ends_and_owner_count_is_what_one_process_would_count():
    alone, parts = process(range(5), 7), [process(range(2), 0), process(range(2, 5), 0), process(range(0), 7)]
    together = merged([families(one) for one in parts])
    for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_sum",
                 "vllm:time_to_first_token_seconds_count", "vllm:num_requests_running"):  # fmt: skip
        assert value(together, name) == value(families(alone), name)
    assert value(together, "vllm:num_requests_running") == 3, "a gauge is not added up"
    assert b"vllm:generation_tokens_total" in page_of(together)
    summed: Any = SummedTotals()
    summed.update(together)
    expected = alone.totals()
    found = summed.totals()
    assert (found.generated, found.computed, found.num_ended) == (14, expected.computed, 5)
    assert found.itl.counts == expected.itl.counts and found.itl.bounds == expected.itl.bounds
    assert found.ttft.quantile(0.5) == expected.ttft.quantile(0.5) and summed.last_stats.num_running == 3


def test_counters_of_a_process_that_has_ended_stay_and_its_gauges_do_not():
    ended = [one for one in families(process(range(2), 3)) if one.type in ADDED_TYPES]
    together = merged([families(process(range(1), 0)), ended])
    assert value(together, "vllm:generation_tokens_total") == 6 and value(together, "vllm:num_requests_running") == 0
    assert value(together, "vllm:time_to_first_token_seconds_count") == 3
