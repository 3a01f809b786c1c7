"""Which models are in memory, and which requests wait: the rules, under a virtual clock."""

from __future__ import annotations

import pytest

from quire.errors import NotEnoughMemoryError, QuireServerError
from quire.server.switching.life_cycle import NEXT, ModelState
from quire.server.switching.load_times import FIXED_S, LoadTimes
from quire.server.switching.schedule import FIRST_PAUSE_S, ModelSchedule, Order, OrderKind
from quire.server.switching.slot import Slot, Ticket

TURN_S = 10.0
GB = 10**9


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Driven:
    """A schedule, with orders carried out by the test; models a, b, c of 1 GB each, two fit."""

    def __init__(self, budget: int = 2 * GB, idle_unload_s: float | None = None, **pinned: bool) -> None:
        self.clock = Clock()
        slots = [Slot(name, GB, GB, is_pinned=pinned.get(name, False)) for name in "abc"]
        self.schedule = ModelSchedule(slots, budget, busy_turn_s=TURN_S, idle_unload_s=idle_unload_s, clock=self.clock)

    def state(self, name: str) -> ModelState:
        return self.schedule.slots[name].state

    def poll(self) -> list[str]:
        """Orders as "load a"."""
        return [f"{one.kind.value} {one.model}" for one in self.schedule.poll()]

    def load(self, name: str, seconds: float = 1.0) -> Ticket:
        """A request for a model that loads at once; it runs."""
        ticket = self.schedule.enter(name)
        if self.schedule.poll() == [Order(OrderKind.LOAD, name)]:
            self.clock.now += seconds
            self.schedule.loaded(name)
        assert ticket.stay is not None
        return ticket

    def use(self, name: str) -> None:
        """A request for a model that loads at once, and has ended."""
        self.schedule.leave(self.load(name))


def test_every_state_can_be_left_and_reached():
    reached = {state for states in NEXT.values() for state in states}
    assert set(NEXT) == set(ModelState) and reached == set(ModelState)
    assert all(NEXT.values())


def test_a_model_is_loaded_on_first_use_and_stays():
    driven = Driven()
    ticket = driven.schedule.enter("a")
    assert driven.poll() == ["load a"] and driven.state("a") is ModelState.LOADING and ticket.stay is None
    driven.schedule.loaded("a")
    assert driven.state("a") is ModelState.READY and ticket.stay is not None
    driven.schedule.leave(ticket)
    driven.clock.now += 1e6
    assert driven.poll() == [] and driven.state("a") is ModelState.READY


def test_the_least_recently_used_model_makes_room():
    driven = Driven()
    for name in "ab":
        driven.use(name)
        driven.clock.now += 1
    driven.use("a")
    ticket = driven.schedule.enter("c")
    assert driven.poll() == ["unload b"] and driven.state("c") is ModelState.QUEUED
    driven.schedule.unloaded("b")
    assert driven.poll() == ["load c"] and ticket.stay is None


def test_models_are_loaded_one_at_a_time_in_the_order_of_their_oldest_requests():
    driven = Driven(budget=3 * GB)
    for name in "bca":
        driven.schedule.enter(name)
        driven.clock.now += 1
    assert driven.poll() == ["load b"] and driven.poll() == []
    driven.schedule.loaded("b")
    assert driven.poll() == ["load c"]
    driven.schedule.loaded("c")
    assert driven.poll() == ["load a"]


def test_a_busy_model_keeps_its_memory_for_a_turn_and_is_then_drained():
    driven = Driven()
    running = driven.load("a"), driven.load("b")
    waiting = driven.schedule.enter("c")
    assert driven.poll() == []
    assert driven.schedule.wake_s == pytest.approx(driven.schedule.slots["a"].ready_s + TURN_S)
    driven.clock.now = driven.schedule.wake_s or 0.0
    assert driven.poll() == [] and driven.state("a") is ModelState.DRAINING and driven.state("b") is ModelState.READY
    late = driven.schedule.enter("a")
    assert late.stay is None  # behind the one that waited before
    driven.schedule.leave(running[0])
    assert driven.poll() == ["unload a"]
    driven.schedule.unloaded("a")
    assert driven.poll() == ["load c"]
    driven.schedule.loaded("c")
    assert waiting.stay is not None and late.stay is None and driven.state("a") is ModelState.QUEUED


def test_a_model_that_becomes_idle_makes_room_before_its_turn_is_over():
    driven = Driven()
    running = driven.load("a"), driven.load("b")
    driven.schedule.enter("c")
    assert driven.poll() == []
    driven.schedule.leave(running[1])
    assert driven.poll() == ["unload b"]


def test_a_draining_model_goes_on_when_nothing_waits_for_its_memory_any_more():
    driven = Driven()
    for name in "ab":
        driven.load(name)
    waiting = driven.schedule.enter("c")
    driven.clock.now += 2 * TURN_S
    driven.poll()
    late = driven.schedule.enter("a")
    driven.schedule.leave(waiting)
    assert driven.poll() == [] and driven.state("a") is ModelState.READY and late.stay is not None
    assert driven.state("c") is ModelState.UNLOADED


def test_pinned_models_are_never_unloaded_for_another():
    driven = Driven(a=True)
    driven.use("a")
    driven.clock.now += 100
    busy = driven.load("b")
    driven.schedule.enter("c")
    assert driven.poll() == []
    driven.clock.now += 2 * TURN_S
    driven.poll()
    assert driven.state("b") is ModelState.DRAINING and driven.state("a") is ModelState.READY
    driven.schedule.leave(busy)
    assert driven.poll() == ["unload b"]


def test_no_more_models_than_needed_are_unloaded():
    driven = Driven(budget=3 * GB)
    driven.schedule.slots["b"].num_bytes = 2 * GB
    driven.schedule.slots["c"].num_bytes = 2 * GB
    driven.use("a")
    driven.use("b")
    driven.schedule.enter("c")
    assert driven.poll() == ["unload b"]  # a was used less recently, but is too small to help


def test_a_model_that_can_never_fit_fails_its_requests_alone():
    driven = Driven(budget=2 * GB, a=True)
    driven.schedule.slots["b"].num_bytes = 2 * GB
    large, small = driven.schedule.enter("b"), driven.schedule.enter("c")
    assert driven.poll() == ["load c"]
    assert isinstance(large.error, NotEnoughMemoryError) and large.error.field == "memory_budget"
    assert "pinned models leave" in large.error.message and large.error.hint and "memory_budget" in large.error.hint
    assert small.error is None and driven.state("b") is ModelState.FAILED


def test_a_failed_load_fails_those_that_wait_for_it_and_is_tried_again_after_a_pause():
    driven = Driven()
    waiting, other = driven.schedule.enter("a"), driven.schedule.enter("b")
    assert driven.poll() == ["load a"]
    error = QuireServerError("no")
    driven.schedule.failed("a", error)
    assert waiting.error is error and other.error is None and driven.state("a") is ModelState.FAILED
    assert driven.poll() == ["load b"]
    assert driven.schedule.enter("a").error is error
    driven.clock.now += FIRST_PAUSE_S
    again = driven.schedule.enter("a")
    assert again.error is None and driven.state("a") is ModelState.QUEUED
    driven.schedule.loaded("b")
    assert driven.poll() == ["load a"]
    driven.schedule.failed("a", error)
    driven.clock.now += FIRST_PAUSE_S
    assert driven.schedule.enter("a").error is error  # the second pause is longer


def test_a_model_whose_engine_died_is_loaded_again_and_what_ran_on_it_does_not_count():
    driven = Driven()
    old = driven.load("a")
    driven.schedule.died("a", QuireServerError("gone"))
    assert driven.poll() == ["unload a"]
    driven.schedule.unloaded("a")
    assert driven.state("a") is ModelState.FAILED and driven.schedule.used_bytes == 0
    driven.clock.now += FIRST_PAUSE_S
    driven.load("a")
    driven.schedule.leave(old)
    assert driven.schedule.slots["a"].users == 1


def test_an_idle_model_is_unloaded_after_the_time_that_was_set():
    driven = Driven(idle_unload_s=30.0, b=True)
    driven.use("a")
    driven.use("b")
    assert driven.schedule.wake_s == pytest.approx(driven.schedule.slots["a"].used_s + 30.0)
    driven.clock.now = driven.schedule.wake_s or 0.0
    assert driven.poll() == ["unload a"]
    driven.clock.now += 100
    assert driven.poll() == []  # b is pinned


def test_an_operator_unloads_a_model_when_its_requests_have_ended():
    driven = Driven()
    running = driven.load("a")
    assert driven.schedule.dismiss("a") and not driven.schedule.dismiss("b")
    late = driven.schedule.enter("a")
    assert driven.poll() == [] and driven.state("a") is ModelState.DRAINING and late.stay is None
    driven.schedule.leave(running)
    assert driven.poll() == ["unload a"]
    driven.schedule.unloaded("a")
    assert driven.poll() == ["load a"]  # somebody asked for it meanwhile


def test_a_size_that_is_not_known_is_found_out_and_holds_up_no_other_model():
    driven = Driven()
    driven.schedule.slots["a"].num_bytes = None
    first = driven.schedule.enter("a")
    driven.clock.now += 1
    driven.schedule.enter("b")
    assert driven.poll() == ["measure a", "load b"] and driven.poll() == []
    driven.schedule.measured("a", GB, GB)
    driven.schedule.loaded("b")
    assert driven.poll() == ["load a"]
    driven.schedule.loaded("a")
    assert first.stay is not None


def test_a_model_that_turns_out_larger_sends_others_out():
    driven = Driven()
    driven.use("a")
    driven.schedule.enter("b")
    driven.poll()
    driven.schedule.loaded("b", num_bytes=3 * GB // 2)
    assert driven.poll() == ["unload a"]
    driven.schedule.unloaded("a")
    assert driven.schedule.used_bytes <= 2 * GB


def test_the_predicted_wait_counts_the_loads_ahead_and_the_turns_of_busy_models():
    driven = Driven()
    times = driven.schedule.load_times
    for name in "abc":
        times.note(name, GB, 4.0)
    assert driven.schedule.predicted_wait_s("a") == pytest.approx(4.0)
    driven.schedule.enter("a")
    driven.poll()
    driven.clock.now += 1
    assert driven.schedule.predicted_wait_s("a") == pytest.approx(3.0)
    assert driven.schedule.predicted_wait_s("b") == pytest.approx(3.0 + 4.0)
    driven.schedule.loaded("a")
    assert driven.schedule.predicted_wait_s("a") == 0.0
    driven.load("b")
    assert driven.schedule.predicted_wait_s("c") == pytest.approx(4.0 + TURN_S, abs=1.1)


def test_load_times_follow_what_was_measured():
    times = LoadTimes()
    assert times.predict("a", 2 * GB) == pytest.approx(FIXED_S + 2 * GB / (1 << 30))
    for _ in range(20):
        times.note("a", GB, FIXED_S + 3.0)
    assert times.predict("a", GB) == pytest.approx(FIXED_S + 3.0)
    assert times.predict("b", 2 * GB) == pytest.approx(FIXED_S + 6.0, rel=0.01)
    assert times.s_per_gb == pytest.approx(3.0, rel=0.01)
