"""What a tenant with many requests does to another's steps under `fair`, by a clock that the test makes up."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.step_costs import StepCosts
from quire.scheduler.tenant_turns import quotas
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler

STREAM, CHAT = 1000, 2000


def seconds(scheduled: SchedulerOutput) -> float:
    """10 ms, 1 ms a decoding request, 0.5 ms a token of a prompt."""
    num_decoding = int((scheduled.num_scheduled_tokens == 1).sum())
    return 0.010 + 0.001 * num_decoding + 0.0005 * (scheduled.total_num_scheduled_tokens - num_decoding)


FAIR_S = 0.012  # two requests


def engine_of(**settings: object) -> Engine:
    defaults: dict[str, object] = {
        "num_blocks": 4000, "block_size": 16, "max_model_len": 1000, "max_num_seqs": 128, "budget": 2048,
        "prefix_caching": False, "max_decode_slowdown": 2.0, "scheduling_policy": "fair",
    }  # fmt: skip
    return Engine(make_scheduler(**{**defaults, **settings}), duration=seconds)  # type: ignore[arg-type]


def add_flood(engine: Engine, count: int, prompt: int, max_tokens: int) -> None:
    engine.add(*(make_request(handle, prompt, max_tokens=max_tokens, tenant="flood") for handle in range(count)))


def steps_of(engine: Engine, count: int) -> list[SchedulerOutput]:
    engine.scheduled.clear()
    for _ in range(count):
        engine.step()
    return engine.scheduled


def crowded(policy: str = "fair") -> Engine:
    """24 streams of one tenant, which have run alone, and one of another, which has come."""
    engine = engine_of(scheduling_policy=policy)
    add_flood(engine, 24, 2, 50)
    steps_of(engine, 5)
    engine.add(make_request(STREAM, 4, max_tokens=60, tenant="neighbour"))
    steps_of(engine, 15)  # sizes that were never there are measured
    return engine


def test_a_flood_of_streams_makes_steps_of_a_neighbour_half_longer_and_no_more():
    engine = crowded()
    before = {handle: len(tokens) for handle, tokens in engine.tokens.items()}
    steps = steps_of(engine, 25)
    gained = {handle: len(tokens) - before[handle] for handle, tokens in engine.tokens.items()}
    assert max(map(seconds, steps)) <= 1.5 * FAIR_S
    assert gained[STREAM] == 25, "the neighbour is in every step"
    of_flood = [gained[handle] for handle in range(24)]
    assert max(of_flood) - min(of_flood) <= 1 and sum(of_flood) >= 5 * 25, "the others take turns"


def test_by_arrival_a_neighbour_decodes_beside_all_of_the_flood():
    assert all(len(step.rows) == 25 for step in steps_of(crowded("fcfs"), 5))


def test_who_is_alone_again_has_whole_steps():
    engine = crowded()
    while STREAM not in engine.finished:
        engine.step()
    assert all(len(step.rows) == 24 for step in steps_of(engine, 3))
    engine.run()
    expected, _ = expected_answer(make_request(3, 2, max_tokens=50, tenant="flood"), 1000)
    assert engine.tokens[3] == expected


def test_a_thousand_prompts_of_a_tenant_keep_no_chat_of_another_from_the_next_step():
    engine = engine_of()
    add_flood(engine, 1000, 200, 1)
    engine.add(make_request(STREAM, 16, max_tokens=300, tenant="neighbour"))
    steps_of(engine, 80)
    num_steps = []
    for chat in range(CHAT, CHAT + 5):
        steps_of(engine, 30)
        engine.add(make_request(chat, 20, max_tokens=1, tenant="neighbour"))
        engine.scheduled.clear()
        while chat not in engine.finished:
            engine.step()
        assert len(engine.scheduled[0].new_reqs) >= 1, "it has a row at once"
        assert all(seconds(step) <= 2 * FAIR_S + 0.004 for step in engine.scheduled)  # 8 tokens are always allowed
        num_steps.append(len(engine.scheduled))
    assert np.median(num_steps) <= 3
    assert len([handle for handle in engine.finished if handle < 1000]) > 10, "the flood goes on"


@pytest.mark.parametrize(
    ("num_decoding", "weights", "most", "expected"),
    [
        ([1, 100], [1, 1], 8, [1, 7]),
        ([50, 100], [1, 1], 9, [5, 4]),
        ([50, 100], [2, 1], 9, [6, 3]),
        ([3, 0, 100], [1, 1, 1], 20, [3, 0, 17]),
        ([5, 5], [1, 1], 1, [1, 1]),
        ([2, 3], [1, 1], 50, [2, 3]),
    ],
    ids=["few beside many", "many beside many", "by weight", "nothing to decode", "never none", "room for all"],
)
def test_quotas_share_a_step_by_weight(num_decoding: list[int], weights: list[int], most: int, expected: list[int]):
    found = quotas(np.array(num_decoding), np.array(weights, dtype=float), most).tolist()
    assert sum(found) == sum(expected) and all(abs(a - b) <= 1 for a, b in zip(found, expected, strict=True)), found


def test_sizes_of_steps_between_measured_ones_are_interpolated():
    costs = StepCosts(2.0)
    for size, duration in ((2, 0.012), (8, 0.018), (64, 0.074)):
        costs.record(size, 0, duration)
    assert costs.most_decoding(2, 64) == 8
    assert costs.most_decoding(2, 8) == 8
    costs.record(8, 0, 0.024)
    assert costs.most_decoding(2, 64) in (5, 8), "the lower median of what was measured"
    assert StepCosts(2.0).most_decoding(2, 64) == 64, "nothing was measured"
    assert StepCosts(float("inf"), 0.1).most_decoding(2, 64) == 64, "there is no bound"
