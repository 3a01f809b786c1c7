"""Random arrivals, sizes, failures and departures: no request is lost, the budget holds, nothing waits for ever."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import QuireServerError
from quire.server.switching.life_cycle import ModelState
from quire.server.switching.schedule import ModelSchedule, OrderKind
from quire.server.switching.slot import Slot, Ticket

BUDGET, TURN_S, UNLOAD_S, MEASURE_S, LONGEST_S = 12, 5.0, 0.5, 0.25, 8.0


@dataclass(frozen=True)
class Arrival:
    """A request: when, for which model, how long it runs, and when its client leaves (None = never)."""

    at_s: float
    model: int
    runs_s: float
    leaves_s: float | None


@dataclass(frozen=True)
class World:
    """What happens."""

    sizes: tuple[int, ...]
    is_pinned: bool
    is_known: bool
    idle_unload_s: float | None
    arrivals: tuple[Arrival, ...]
    loads: tuple[tuple[float, str], ...]  # how long each takes, and what becomes of it


seconds = st.floats(0.0, LONGEST_S, allow_nan=False)
worlds = st.builds(
    World,
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=5).map(tuple),
    is_pinned=st.booleans(),
    is_known=st.booleans(),
    idle_unload_s=st.none() | st.floats(1.0, 10.0),
    arrivals=st.lists(
        st.builds(Arrival, st.floats(0.0, 60.0), st.integers(0, 4), seconds, st.none() | seconds), max_size=40
    ).map(tuple),
    loads=st.lists(
        st.tuples(seconds, st.sampled_from(("ready", "ready", "ready", "fails", "dies"))), min_size=1, max_size=20
    ).map(tuple),
)


class Simulation:
    """Carries a schedule's orders out in virtual time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._loads = itertools.cycle(world.loads)
        self.ended: dict[int, str] = {}
        self.waits: list[float] = []
        self.names = [f"m{index}" for index in range(len(world.sizes))]
        # A pinned model leaves room for the largest of the others.
        is_first_pinned = world.is_pinned and world.sizes[0] + max(world.sizes[1:]) <= BUDGET
        slots = [
            Slot(name, size if world.is_known else None, is_pinned=is_first_pinned and not index)
            for index, (name, size) in enumerate(zip(self.names, world.sizes, strict=True))
        ]
        self.schedule = ModelSchedule(
            slots, BUDGET, busy_turn_s=TURN_S, idle_unload_s=world.idle_unload_s, clock=lambda: self.now
        )

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._serial), what))

    def run(self) -> None:
        for number, arrival in enumerate(self.world.arrivals):
            self.at(arrival.at_s, lambda number=number, arrival=arrival: self._arrive(number, arrival))  # type: ignore[misc]
        for _ in range(20_000):
            wake_s = self.schedule.wake_s
            if wake_s is not None:
                self.at(wake_s, lambda: None)
            if not self._events:
                return
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._poll()
        raise AssertionError("the schedule does not come to rest")

    def _poll(self) -> None:
        for order in self.schedule.poll():
            if order.kind is OrderKind.MEASURE:
                size = self.world.sizes[self.names.index(order.model)]
                self.at(
                    self.now + MEASURE_S, lambda name=order.model, size=size: self.schedule.measured(name, size, size)
                )  # type: ignore[misc]
            elif order.kind is OrderKind.LOAD:
                seconds, outcome = next(self._loads)
                self.at(self.now + seconds, lambda name=order.model, how=outcome: self._end_load(name, how))  # type: ignore[misc]
            else:
                self.at(self.now + UNLOAD_S, lambda name=order.model: self.schedule.unloaded(name))  # type: ignore[misc]
        assert self.schedule.used_bytes <= BUDGET

    def _end_load(self, name: str, outcome: str) -> None:
        if outcome == "fails":
            self.schedule.failed(name, QuireServerError(name))
            return
        self.schedule.loaded(name)
        if outcome == "dies":
            stay = self.schedule.slots[name].stay
            self.at(self.now + 1.0, lambda: self._die(name, stay))

    def _die(self, name: str, stay: int) -> None:
        if self.schedule.slots[name].stay == stay:
            self.schedule.died(name, QuireServerError(name))

    def _arrive(self, number: int, arrival: Arrival) -> None:
        name = self.names[arrival.model % len(self.names)]
        ticket = self.schedule.enter(name)

        def change() -> None:
            ticket.on_change = unexpected
            if ticket.error is not None:
                assert str(ticket.error) == name, "it fails for its own model alone"
                self._end(number, "failed")
                return
            assert self.schedule.slots[name].state is ModelState.READY
            self.waits.append(self.now - arrival.at_s)
            self.at(self.now + arrival.runs_s, lambda: self._end(number, "served", ticket))

        def unexpected() -> None:
            raise AssertionError("a ticket changes once")

        if ticket.stay is not None or ticket.error is not None:
            change()
            return
        ticket.on_change = change
        if arrival.leaves_s is not None:
            self.at(self.now + arrival.leaves_s, lambda: self._leave(number, ticket))

    def _leave(self, number: int, ticket: Ticket) -> None:
        if ticket.stay is None and ticket.error is None:
            self._end(number, "left", ticket)

    def _end(self, number: int, how: str, ticket: Ticket | None = None) -> None:
        assert number not in self.ended, "a request ends once"
        self.ended[number] = how
        if ticket is not None:
            self.schedule.leave(ticket)


@given(worlds)
@settings(max_examples=200, deadline=None)
def test_every_request_ends_within_the_budget_and_none_waits_for_ever(world: World):
    simulation = Simulation(world)
    simulation.run()
    assert sorted(simulation.ended) == list(range(len(world.arrivals)))
    assert all(slot.users == 0 and not slot.waiting for slot in simulation.schedule.slots.values())
    # Each model ahead costs a turn, what runs at its end, an unload and a load at most, whatever else arrives.
    one_model_s = TURN_S + LONGEST_S + UNLOAD_S + LONGEST_S
    assert max(simulation.waits, default=0.0) <= (len(world.sizes) + 1) * one_model_s + MEASURE_S
