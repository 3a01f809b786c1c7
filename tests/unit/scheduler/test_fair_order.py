"""The policy `fair`: tenants get shares, whoever floods, pauses or comes late."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quire.core.stats import EventKind
from quire.scheduler.fair_order import FairOrder
from quire.scheduler.virtual_counters import INPUT_COST, MAX_IDLE_TENANTS, OUTPUT_COST, VirtualCounters
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler


def fair(**settings: object) -> Engine:
    defaults: dict[str, object] = {
        "num_blocks": 200, "block_size": 4, "max_model_len": 100, "max_num_seqs": 6, "prefix_caching": False,
    }  # fmt: skip
    return Engine(make_scheduler(**{**defaults, **settings}, scheduling_policy="fair"))  # type: ignore[arg-type]


def order_of(engine: Engine) -> FairOrder:
    order = engine.scheduler._order
    assert isinstance(order, FairOrder)
    return order


def counter_of(engine: Engine, tenant: str) -> float:
    counters = order_of(engine)._counters
    return float(counters.counters[counters._slots[tenant]])


def handles_scheduled(engine: Engine) -> list[int]:
    return [event.handle for event in engine.events if event.kind is EventKind.SCHEDULED]


def service_of(engine: Engine, tenant_of: dict[int, str]) -> dict[str, float]:
    """Output tokens by tenant."""
    served: dict[str, float] = dict.fromkeys(tenant_of.values(), 0.0)
    for handle, tokens in engine.tokens.items():
        served[tenant_of[handle]] += len(tokens)
    return served


def saturate(engine: Engine, tenants: dict[str, dict[str, object]], num_steps: int) -> dict[str, float]:
    """Keep five requests of each tenant waiting for so many steps; output tokens that each got."""
    handles, tenant_of = itertools.count(), {}
    for _ in range(num_steps):
        for tenant, request in tenants.items():
            open_now = sum(1 for handle, name in tenant_of.items() if name == tenant and handle not in engine.finished)
            for _ in range(11 - open_now):
                handle = next(handles)
                tenant_of[handle] = tenant
                engine.add(make_request(handle, tenant=tenant, **request))  # type: ignore[arg-type]
        engine.step()
    return service_of(engine, tenant_of)


def test_tokens_follow_weights_under_saturation():
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    served = saturate(fair(), {name: {"weight": weight, "max_tokens": 7} for name, weight in weights.items()}, 1500)
    shares = {name: served[name] / weights[name] for name in weights}
    mean = sum(shares.values()) / 3
    assert all(abs(share / mean - 1) < 0.05 for share in shares.values()), served


def test_long_answers_get_no_more_than_short_ones():
    tenants: dict[str, dict[str, object]] = {"long": {"max_tokens": 40}, "short": {"max_tokens": 4}}
    engine = fair()
    saturate(engine, tenants, 1500)
    assert counter_of(engine, "long") == pytest.approx(counter_of(engine, "short"), rel=0.03)


def test_the_gap_between_tenants_that_wait_is_bounded_by_what_runs_at_once():
    tenants: dict[str, dict[str, object]] = {
        "heavy": {"prompt": 30, "max_tokens": 30, "weight": 1.0},
        "light": {"prompt": 3, "max_tokens": 2, "weight": 1.0},
        "half": {"prompt": 9, "max_tokens": 12, "weight": 0.5},
    }
    most_at_once = 6 * max(
        (INPUT_COST * one["prompt"] + OUTPUT_COST * one["max_tokens"]) / one["weight"]  # type: ignore[operator]
        for one in tenants.values()
    )
    engine, widest = fair(), 0.0
    step = engine.step

    def watched_step() -> object:
        scheduled = step()
        counters = [counter_of(engine, tenant) for tenant in tenants]
        nonlocal widest
        widest = max(widest, max(counters) - min(counters))
        return scheduled

    engine.step = watched_step  # type: ignore[method-assign,assignment]
    saturate(engine, tenants, 800)
    assert 0 < widest <= most_at_once


def test_a_pause_earns_no_credit():
    engine = fair(max_num_seqs=2)
    busy = {"busy": {"max_tokens": 5}}
    saturate(engine, busy, 300)
    engine.add(*(make_request(10_000 + i, tenant="back", max_tokens=5) for i in range(40)))
    assert counter_of(engine, "back") == counter_of(engine, "busy") > 500
    start = {tenant: counter_of(engine, tenant) for tenant in ("back", "busy")}
    for _ in range(30):
        engine.step()
    gained = {tenant: counter_of(engine, tenant) - start[tenant] for tenant in start}
    assert gained["back"] == pytest.approx(gained["busy"], abs=2 * (5 + 2 * 5)), "as much as the other, not more"


def test_a_newcomer_takes_a_row_from_a_flood_at_once_and_only_one():
    engine = fair(max_num_seqs=4)
    flood = [make_request(handle, 6, max_tokens=60, tenant="flood") for handle in range(12)]
    engine.add(*flood)
    for _ in range(5):
        engine.step()
    light = make_request(99, 6, max_tokens=3, tenant="light")
    engine.add(light)
    engine.step()
    engine.step()
    assert 99 in handles_scheduled(engine) and len(engine.tokens[99]) >= 1
    assert engine.num_preemptions == 1
    preempted = [event.handle for event in engine.events if event.kind is EventKind.PREEMPTED]
    assert preempted == [3], "the youngest of the flood's rows"
    engine.run()
    for request in (*flood, light):
        assert engine.tokens[request.handle] == expected_answer(request, 100)[0]


def test_a_newcomer_takes_pages_from_a_flood_of_few_long_requests():
    engine = fair(max_num_seqs=8, num_blocks=37)
    engine.add(*(make_request(handle, 60, max_tokens=15, tenant="flood") for handle in range(2)))
    for _ in range(3):
        engine.step()
    engine.add(make_request(99, 30, max_tokens=3, tenant="light"))
    engine.step()
    assert handles_scheduled(engine)[-1] == 99
    assert engine.num_preemptions == 1
    engine.run()


def test_two_tenants_that_cannot_run_together_do_not_stop_each_other_in_turns():
    engine = fair(max_num_seqs=4, num_blocks=21)
    for handle in range(6):
        engine.add(make_request(handle, 60, max_tokens=15, tenant="ab"[handle % 2]))
    engine.run()
    assert not engine.num_preemptions


def test_under_a_flood_preemptions_are_bounded_by_the_arrivals_of_others():
    engine = fair(max_num_seqs=4)
    engine.add(*(make_request(handle, 6, max_tokens=30, tenant="flood") for handle in range(40)))
    num_light = 0
    for step in range(200):
        if step % 7 == 0:
            engine.add(make_request(1000 + step, 6, max_tokens=3, tenant=f"light {step % 3}"))
            num_light += 1
        engine.step()
    assert 0 < engine.num_preemptions <= num_light
    engine.run()


def test_a_flood_of_long_prompts_leaves_room_for_a_short_one_in_the_next_step():
    engine = fair(max_num_seqs=8, budget=16)
    engine.add(*(make_request(handle, 90, max_tokens=3, tenant="flood") for handle in range(4)))
    for _ in range(3):
        engine.step()
    engine.add(make_request(99, 10, max_tokens=3, tenant="light"))
    engine.step()
    assert len(engine.tokens[99]) == 1
    engine.run()


def test_the_pace_of_a_flood_does_not_cut_a_newcomers_prompt_but_that_of_others_like_it_does():
    def pieces(*tenants: str) -> int:
        engine = fair(max_num_seqs=4, max_inter_token_latency_ms=1e-3, budget=90)
        engine.duration = lambda scheduled: 0.1 * scheduled.total_num_scheduled_tokens
        for handle, tenant in enumerate(tenants):
            engine.add(make_request(handle, 3, max_tokens=60, tenant=tenant))
        for _ in range(4):
            engine.step()
        engine.add(make_request(99, 60, max_tokens=1, tenant="light"))
        before = len(engine.scheduled)
        while not engine.tokens[99]:
            engine.step()
        return len(engine.scheduled) - before

    assert pieces("flood", "flood", "flood") == 1
    assert pieces("flood", "flood", "light") > 5, "8 tokens a step"


def test_a_newcomers_prompt_in_pieces_does_not_wait_for_those_of_a_flood():
    """The bound of a step leaves some prompt tokens beside those that decode."""
    engine = fair(max_num_seqs=6, max_inter_token_latency_ms=200.0, budget=90)
    engine.duration = lambda scheduled: 0.01 * scheduled.total_num_scheduled_tokens
    engine.add(make_request(0, 3, max_tokens=90, tenant="steady"))
    engine.add(*(make_request(handle, 3, max_tokens=90, tenant="flood") for handle in (1, 2)))
    for _ in range(20):
        engine.step()
    engine.add(*(make_request(handle, 90, max_tokens=2, tenant="flood") for handle in (3, 4)))
    for _ in range(3):
        engine.step()
    engine.add(make_request(99, 45, max_tokens=2, tenant="light"))
    num_computed: list[int] = []
    while not engine.tokens[99]:
        scheduled = engine.step()
        assert scheduled is not None
        row = engine.scheduler._table.handle.tolist().index(99)
        entry = scheduled.rows.tolist().index(row) if row in scheduled.rows else None
        num_computed.append(0 if entry is None else int(scheduled.num_scheduled_tokens[entry]))
    assert len(num_computed) > 2 and sum(num_computed) == 45, "it comes in pieces"
    assert all(num_computed), "and in every step"
    engine.run()


def test_only_a_request_within_its_tenants_share_may_claim_a_place():
    engine = fair(max_num_seqs=6)
    engine.add(*(make_request(handle, 6, max_tokens=60, tenant="flood") for handle in range(3)))
    engine.add(make_request(10, 6, max_tokens=60, tenant="steady"))
    engine.step()
    engine.add(
        make_request(11, 6, tenant="flood"), make_request(12, 6, tenant="steady"), make_request(13, tenant="new")
    )
    order, requests = order_of(engine), engine.scheduler._requests
    assert [order.may_preempt_others(requests[handle]) for handle in (11, 12, 13)] == [False, True, True]
    engine.run()


def test_while_one_waits_others_get_no_more_than_the_gap_and_what_they_have_running():
    """The bound on waiting: each other tenant's service while the head of a tenant's queue waits."""
    engine = fair(max_num_seqs=3)
    cost = (INPUT_COST * 5 + OUTPUT_COST * 8) * 3
    handles = itertools.count()
    for tenant in "abcd":
        engine.add(*(make_request(next(handles), 5, max_tokens=8, tenant=tenant) for _ in range(10)))
    waiting_since: dict[int, dict[str, float]] = {}
    for _ in range(150):
        now = {tenant: counter_of(engine, tenant) for tenant in "abcd"}
        started = {event.handle for event in engine.events if event.kind is EventKind.SCHEDULED}
        for slot, queue in order_of(engine).queue._by_slot.items():
            head = queue.peek()
            since = waiting_since.setdefault(head.handle, now)
            if head.handle not in started:
                assert all(now[t] - since[t] <= 2 * cost for t in "abcd"), f"tenant {slot} waits too long"
        engine.step()
    assert waiting_since


def test_each_tenant_orders_its_own_requests_by_its_own_policy():
    engine = fair(max_num_seqs=1)
    engine.add(make_request(0, 5, max_tokens=1, tenant="x"))
    for handle, priority in ((1, 5), (2, -1), (3, 0)):
        engine.add(make_request(handle, 5, max_tokens=1, priority=priority, tenant="urgent", tenant_policy="priority"))
    for handle, length in ((4, 30), (5, 10), (6, 20)):
        engine.add(make_request(handle, length, max_tokens=1, tenant="short", tenant_policy="shortest"))
    engine.run()
    scheduled = handles_scheduled(engine)
    assert [handle for handle in scheduled if handle in (1, 2, 3)] == [2, 3, 1]
    assert [handle for handle in scheduled if handle in (4, 5, 6)] == [5, 6, 4]


def test_cached_prompts_are_not_charged():
    engine = fair(prefix_caching=True)
    text = [7] * 41
    engine.add(make_request(0, text, max_tokens=1, tenant="a"))
    engine.run()
    engine.add(make_request(1, text, max_tokens=1, tenant="b"))
    before = counter_of(engine, "b")
    engine.run()
    assert counter_of(engine, "b") - before == INPUT_COST * 1 + OUTPUT_COST * 1
    assert counter_of(engine, "a") == INPUT_COST * 41 + OUTPUT_COST * 1


def test_recomputing_after_a_preemption_is_not_charged():
    engine = fair(num_blocks=12, max_num_seqs=4)
    engine.add(*(make_request(handle, 5, max_tokens=30, tenant="a") for handle in range(3)))
    engine.run()
    assert engine.num_preemptions > 0
    assert counter_of(engine, "a") == 3 * (INPUT_COST * 5 + OUTPUT_COST * 30)


def test_idle_tenants_are_forgotten_once_they_are_owed_nothing():
    counters = VirtualCounters()
    busy = counters.slot_of("busy", 1.0)
    for i in range(3 * MAX_IDLE_TENANTS):
        slot = counters.slot_of(f"passing {i}", 1.0)
        counters.lift(slot, [])
        counters.charge_prompt(slot, 10)
        counters.charge_prompt(busy, 50)
        counters.leave(slot)
    assert len(counters._slots) <= MAX_IDLE_TENANTS + 2
    assert len(counters.counters) == len(counters._free) + len(counters._slots)
    taken = {*counters._slots.values()}
    assert len(taken) == len(counters._slots) and not taken & {*counters._free}


def test_of_equal_counters_the_newcomer_is_first():
    counters = VirtualCounters()
    old, new = counters.slot_of("old", 1.0), counters.slot_of("new", 1.0)
    counters.lift(old, [])
    counters.lift(new, [old])
    assert counters.least([old, new]) == new
    places = counters.places()
    assert places[new] < places[old] and np.array_equal(np.sort(places), np.arange(len(places)))
