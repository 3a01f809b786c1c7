from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.core.request import Request
from quire.core.stats import EventKind
from quire.scheduler.admission import Candidate, GateDecision
from quire.scheduler.policy import ByPriority, ExpectedOutputs
from quire.scheduler.preemption import choose_victim
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.scheduling_policy import RankOrder
from quire.scheduler.swapping import COOLDOWN_STEPS
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler

SCHEDULED, PREEMPTED = EventKind.SCHEDULED, EventKind.PREEMPTED


def crowded(num_reqs: int = 3, num_blocks: int = 8, *, max_tokens: int = 12, **settings: Any) -> Engine:
    """Requests that start together, and a pool that cannot hold all of them to their end."""
    settings = {"preemption_mode": "swap", "num_swap_blocks": 100, "prefix_caching": False, **settings}
    engine = Engine(make_scheduler(num_blocks=num_blocks, block_size=4, max_model_len=60, **settings))
    engine.add(*(make_request(handle, 7, max_tokens=max_tokens) for handle in range(num_reqs)))
    return engine


def step_until_preempted(engine: Engine) -> None:
    while not engine.num_preemptions:
        assert engine.step() is not None


def check_answers(engine: Engine, num_reqs: int, max_tokens: int = 12) -> None:
    for handle in range(num_reqs):
        assert engine.tokens[handle] == expected_answer(make_request(handle, 7, max_tokens=max_tokens), 60)[0]


def num_computed(engine: Engine) -> int:
    return sum(message.total_num_scheduled_tokens for message in engine.scheduled)


def test_no_token_of_a_swapped_request_is_computed_again():
    engine = crowded()
    engine.run()
    check_answers(engine, 3)
    assert engine.num_swap_preemptions == engine.num_preemptions > 0
    assert num_computed(engine) == 3 * (7 + 12 - 1)
    assert engine.stats[-1].num_swapped == 0 and max(stats.num_swapped for stats in engine.stats) > 0


def test_all_computed_pages_go_out_once_and_come_back_to_others():
    engine = crowded(2)
    step_until_preempted(engine)
    outs = engine.scheduled[-1].swap_outs
    assert len(outs) == 3 and engine.stats[-1].swapped_out_bytes == 3 * 4 * 8
    engine.run()
    back = next(message for message in engine.scheduled if len(message.swap_ins))
    assert back.swap_ins.source_ids.tolist() == outs.target_ids.tolist()
    assert back.new_reqs[0].block_ids[0][:3].tolist() == back.swap_ins.target_ids.tolist()


def test_pages_that_are_cached_by_then_are_shared_rather_than_copied_back():
    engine = crowded(prefix_caching=True)
    step_until_preempted(engine)
    engine.abort(0, 1)
    message = engine.step()
    assert message is not None and len(message.new_reqs) == 1
    assert len(message.swap_ins) < len(engine.scheduled[-2].swap_outs)
    engine.run()
    check_answers(engine, 0)
    assert engine.tokens[2] == expected_answer(make_request(2, 7, max_tokens=12), 60)[0]


@pytest.mark.parametrize("settings", [{"num_swap_blocks": 0}, {"preemption_mode": "recompute"}, {"num_swap_blocks": 1}])
def test_without_room_requests_are_computed_again(settings: dict[str, Any]):
    engine = crowded(**settings)
    engine.run()
    check_answers(engine, 3)
    assert engine.num_preemptions > engine.num_swap_preemptions == 0
    assert num_computed(engine) > 3 * 18


def test_a_request_comes_back_only_when_all_can_grow_for_a_while():
    engine = crowded(6, num_blocks=13, max_tokens=24)
    engine.run()
    check_answers(engine, 6, 24)
    victims = [event.handle for event in engine.events if event.kind is PREEMPTED]
    assert len(victims) == len(set(victims)) == 5, "one came back into a pool that was full again soon"


def test_swapped_requests_come_back_before_waiting_ones_in_order_of_rank():
    engine = crowded(5, num_blocks=12, max_tokens=20)
    engine.add(make_request(9, 3, max_tokens=2))
    while engine.stats == [] or engine.stats[-1].num_swapped < 2:
        assert engine.step() is not None
    swapped = [event.handle for event in engine.events if event.kind is PREEMPTED]
    num_events = len(engine.events)
    engine.add(make_request(10, 3, max_tokens=2))
    engine.run()
    returned = [event.handle for event in engine.events[num_events:] if event.kind is SCHEDULED]
    assert returned[-1] == 10 or returned.index(10) > max(returned.index(handle) for handle in swapped)
    check_answers(engine, 5, 20)


def test_an_urgent_arrival_takes_the_place_of_a_lax_request_and_is_not_held_up_by_it():
    engine = crowded(2, num_blocks=8, scheduling_policy="priority", max_num_seqs=2)
    for _ in range(3):
        engine.step()
    engine.add(make_request(7, 7, max_tokens=4, priority=-1))
    message = engine.step()
    assert message is not None and engine.num_swap_preemptions == 1
    assert [new.request_id for new in message.new_reqs] == ["r7"] and len(message.swap_outs)
    engine.run()
    check_answers(engine, 2)


def test_a_gate_that_holds_a_swapped_request_back_does_not_hold_up_those_that_wait():
    held: set[int] = set()

    def gate(candidate: Candidate, plan: object) -> GateDecision:
        return GateDecision.SKIP if candidate.request.handle in held else GateDecision.GO

    engine = crowded(gates=(gate,))
    step_until_preempted(engine)
    held.add(2)
    engine.abort(0, 1)
    engine.add(make_request(5, 7, max_tokens=2))
    while 5 not in engine.finished:
        assert engine.step() is not None
    assert 2 not in engine.finished
    held.clear()
    engine.run()
    assert engine.tokens[2] == expected_answer(make_request(2, 7, max_tokens=12), 60)[0]


def test_when_the_step_that_swaps_out_fails_the_request_is_computed_again():
    engine = crowded()
    while not any(row_missing(engine)):
        engine.step()
    engine.fail_step()
    assert len(engine.scheduler._tiers.swapping) == 0
    engine.run()
    check_answers(engine, 3)


def row_missing(engine: Engine) -> list[bool]:
    """Whether the next step must preempt."""
    kv, table, rows = engine.scheduler._kv, engine.scheduler._table, engine.scheduler._running.rows
    missing = int(kv.num_missing_blocks(rows, table.num_tokens[rows]).sum())
    return [len(rows) > 0 and missing > kv.num_free_blocks]


def test_requests_that_were_swapped_before_a_failed_step_keep_their_pages():
    engine = crowded()
    step_until_preempted(engine)
    engine.fail_step()
    assert len(engine.scheduler._tiers.swapping) == 1
    engine.run()
    check_answers(engine, 3)
    assert sum(len(message.swap_ins) for message in engine.scheduled) >= 2


def test_an_aborted_request_gives_its_host_pages_back_whenever_it_ends():
    engine = crowded()
    step_until_preempted(engine)
    pool = engine.scheduler._tiers.swapping._pool
    assert pool.num_free_blocks == 98
    engine.abort(2)
    assert pool.num_free_blocks == 100
    engine.run()
    check_answers(engine, 2)


def test_auto_recomputes_what_a_copy_costs_more_than():
    engine = crowded(12, num_blocks=13, max_tokens=40, preemption_mode="auto")
    engine.duration, engine.swap_durations = lambda step: 1e-3, lambda step: (100.0, 100.0)
    engine.run()
    check_answers(engine, 12, 40)
    assert 0 < engine.num_swap_preemptions < engine.num_preemptions


def ranked_rows(*ranks: int) -> tuple[RunningRows, RequestTable, RankOrder]:
    table = RequestTable(len(ranks), 10)
    table.rank[:] = ranks
    table.requests = [Request.from_message(make_request(row), rank) for row, rank in enumerate(ranks)]
    running = RunningRows(table)
    running.rows = np.argsort(ranks)
    return running, table, RankOrder(ByPriority(), ExpectedOutputs(), table)


def test_the_victim_is_no_request_that_has_just_returned_when_another_can_be():
    running, table, order = ranked_rows(1, 2, 3)
    assert choose_victim(running, table, order, np.array([2])) == 1
    assert choose_victim(running, table, order, np.array([1])) == 2
    assert choose_victim(running, table, order, np.array([1, 2])) == 2
    assert choose_victim(running, table, order, None) == 2


def test_the_first_in_rank_and_stricter_classes_are_not_stopped_for_one_that_has_just_returned():
    running, table, order = ranked_rows(1, 2)
    assert choose_victim(running, table, order, np.array([1])) == 1
    running, table, order = ranked_rows(1, 2, (5 << 40) + 3)
    assert choose_victim(running, table, order, np.array([2])) == 2


def test_a_returned_request_is_spared_for_so_many_steps():
    engine = crowded(num_blocks=12, max_tokens=30)
    step_until_preempted(engine)
    while not len(engine.scheduled[-1].swap_ins):
        assert engine.step() is not None
    returned = engine.scheduled[-1].new_reqs[0].row
    for _ in range(COOLDOWN_STEPS - 1):
        spared = engine.scheduler._tiers.swapping.rows_to_spare()
        assert spared is not None and returned in spared
        assert engine.step() is not None
    spared = engine.scheduler._tiers.swapping.rows_to_spare()
    assert spared is None or returned not in spared


def auto_with_measurements(num_blocks: int, **settings: Any) -> Engine:
    """Auto, when computing a token costs a little more than copying it, both known for every size."""
    engine = crowded(
        1, num_blocks=num_blocks, max_tokens=30, preemption_mode="auto", prefix_caching=True, max_num_seqs=1,
        scheduling_policy="priority", **settings,
    )  # fmt: skip
    costs = engine.scheduler._tiers.swapping._costs
    assert costs is not None
    for num_blocks in (1, 2, 4, 8) * 3:
        costs._out.record(num_blocks, 1.0)
        costs._in.record(num_blocks, 1.0)
    costs._prompt_tokens.record(5, 1.0)
    return engine


@pytest.mark.parametrize(("num_blocks", "num_swaps"), [(40, 0), (12, 1)], ids=["ample room", "little room"])
def test_auto_expects_cached_pages_to_stay_where_room_is_ample(num_blocks: int, num_swaps: int):
    engine = auto_with_measurements(num_blocks)
    for _ in range(6):  # 12 tokens, 3 blocks: copied they cost 6, computed 12, but nothing while they are cached
        engine.step()
    engine.add(make_request(7, 30, max_tokens=1, priority=-1))
    engine.step()
    assert (engine.num_preemptions, engine.num_swap_preemptions) == (1, num_swaps)
    engine.run()
    assert engine.tokens[0] == expected_answer(make_request(0, 7, max_tokens=30), 60)[0]
