"""ModelSchedule: which models are in memory, and which requests wait for one. Pure: orders out, events in, a clock.

Driven by `pool`, which carries the orders out; tested under a virtual clock. Owns the slots of all models and the
tickets of all requests. The rules:

- A request for a ready model runs. Any other waits, and its model is loaded when its turn comes: the model whose oldest
  request came first is next, one load at a time, and nothing overtakes it.
- Memory for the next model comes from idle ones, the least recently used first, as few as will do.
- Where these do not suffice, models with running requests are drained: those that have been in memory for
  `busy_turn_s` at least, the longest first. A draining model ends what runs; new requests for it wait behind those that
  waited before. So a busy model keeps its memory for a turn, and no model waits for ever.
- Pinned models are never unloaded for another. The sum of what is held never exceeds the budget.
- A failed load fails the requests that wait for it, and no others; later ones are refused until a pause is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from quire.errors import NotEnoughMemoryError
from quire.server.switching.life_cycle import ModelState
from quire.server.switching.load_times import LoadTimes
from quire.server.switching.slot import Slot, Ticket
from quire.utils.memory import format_bytes

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After a failed load, doubled with each in a row."""
LEAST_WAIT_S = 0.1


class OrderKind(Enum):
    """What is to be done with a model."""

    MEASURE = "measure"
    """Find out how much memory it takes; answered by `measured` or `failed`."""
    LOAD = "load"
    """Answered by `loaded` or `failed`."""
    UNLOAD = "unload"
    """Answered by `unloaded`."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done next."""

    kind: OrderKind
    model: str


class ModelSchedule:
    """The models of one server.

    Args:
        slots: all models, unloaded.
        budget_bytes: memory that they may take together.
        busy_turn_s: for so long after its load a model with running requests is not drained for another.
        idle_unload_s: a model that was not used for so long is unloaded; None = only for another.
        clock: seconds.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        budget_bytes: int,
        *,
        busy_turn_s: float,
        idle_unload_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.budget_bytes = budget_bytes
        self.load_times = LoadTimes()
        self._busy_turn_s = busy_turn_s
        self._idle_unload_s = idle_unload_s
        self._clock = clock
        self._orders: list[Order] = []

    # --- requests ---

    def enter(self, model: str) -> Ticket:
        """A request for `model` came: its ticket, which is granted at once, later, or fails."""
        now, slot = self._clock(), self.slots[model]
        ticket = Ticket(model, now)
        if slot.state is ModelState.READY:
            self._grant(slot, ticket)
        elif slot.failure is not None and now < slot.retry_s:
            ticket.error = slot.failure
        else:
            slot.waiting[ticket] = None
            if slot.state in (ModelState.UNLOADED, ModelState.FAILED):
                slot.enter(ModelState.QUEUED)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or waits no longer; harmless when repeated."""
        slot = self.slots[ticket.model]
        if ticket.stay is not None:
            if ticket.stay == slot.stay and slot.users:
                slot.users -= 1
                slot.used_s = self._clock()
            ticket.stay = -1  # of no load
        elif ticket in slot.waiting:
            del slot.waiting[ticket]
            if not slot.waiting and slot.state is ModelState.QUEUED:
                slot.enter(ModelState.UNLOADED)

    def dismiss(self, model: str) -> bool:
        """Unload a model as soon as its running requests have ended, if it is ready; returns whether it was."""
        slot = self.slots[model]
        if slot.state not in (ModelState.READY, ModelState.DRAINING):
            return False
        slot.is_dismissed = True
        if slot.state is ModelState.READY:
            slot.enter(ModelState.DRAINING)
        return True

    def refuse_waiting(self, error: Exception) -> None:
        """No request that waits gets its model any more: each fails with `error`."""
        for slot in self.slots.values():
            if slot.waiting:
                self._refuse_all(slot, error)
            if slot.state is ModelState.QUEUED:
                slot.enter(ModelState.UNLOADED)

    # --- what became of orders ---

    def measured(self, model: str, num_bytes: int, file_bytes: int) -> None:
        """A model takes so much memory, and so much of the disk."""
        slot = self.slots[model]
        slot.num_bytes, slot.file_bytes, slot.is_measured = num_bytes, file_bytes, False

    def loaded(self, model: str, num_bytes: int | None = None) -> None:
        """A model can serve; `num_bytes` is what it takes, where that is more than was thought."""
        slot, now = self.slots[model], self._clock()
        slot.enter(ModelState.READY)
        slot.num_bytes = max(slot.num_bytes or 0, num_bytes or 0)
        slot.ready_s = slot.used_s = now
        slot.failure, slot.num_failures = None, 0
        self.load_times.note(model, slot.file_bytes, now - slot.loading_s)
        self._grant_all(slot)

    def failed(self, model: str, error: Exception) -> None:
        """A model cannot be measured or loaded: those that wait for it fail."""
        slot = self.slots[model]
        slot.is_measured = False
        if slot.state in (ModelState.QUEUED, ModelState.LOADING):
            slot.enter(ModelState.FAILED)
        self._note_failure(slot, error)
        self._refuse_all(slot, error)

    def died(self, model: str, error: Exception) -> None:
        """The engine of a model that was ready is of no further use; its requests have failed."""
        slot = self.slots[model]
        if slot.state in (ModelState.READY, ModelState.DRAINING):
            self._note_failure(slot, error)
            self._unload(slot)

    def unloaded(self, model: str) -> None:
        """A model's memory is free."""
        slot = self.slots[model]
        if slot.waiting:
            slot.enter(ModelState.QUEUED)
        else:
            slot.enter(ModelState.UNLOADED if slot.failure is None else ModelState.FAILED)

    # --- what to do ---

    def poll(self) -> list[Order]:
        """What is to be done now; asked after every event, and when `wake_s` has come."""
        now = self._clock()
        for slot in self.slots.values():
            if (slot.state is ModelState.DRAINING and not slot.users) or self._is_expired(slot, now):
                self._unload(slot)
            elif slot.state is ModelState.QUEUED and slot.num_bytes is None and not slot.is_measured:
                slot.is_measured = True
                self._orders.append(Order(OrderKind.MEASURE, slot.name))
        self._serve(now)
        orders, self._orders = self._orders, []
        return orders

    @property
    def wake_s(self) -> float | None:
        """When `poll` may have something new although nothing happened; None = never."""
        now = self._clock()
        times = [slot.used_s + self._idle_unload_s for slot in self._idle() if self._idle_unload_s is not None]
        if self._next() is not None:
            ready = (slot for slot in self.slots.values() if slot.state is ModelState.READY and not slot.is_pinned)
            times += [slot.ready_s + self._busy_turn_s for slot in ready]
        return min((time for time in times if time > now), default=None)

    # --- what is said of it ---

    @property
    def used_bytes(self) -> int:
        """Memory that is taken."""
        return sum(slot.held_bytes for slot in self.slots.values())

    def predicted_wait_s(self, model: str) -> float:
        """Seconds until `model` is ready, for a request that comes now; 0 = it is."""
        now, slot = self._clock(), self.slots[model]
        if slot.state is ModelState.READY:
            return 0.0
        wait_s = sum(self._left_s(one, now) for one in self.slots.values() if one.state is ModelState.LOADING)
        if slot.state is not ModelState.LOADING:
            ahead = [one for one in self._waiting_in_order() if one is not slot]
            if slot.waiting:
                ahead = [one for one in ahead if one.waits_since_s <= slot.waits_since_s]
            wait_s += sum(self._load_s(one) for one in (*ahead, slot)) + self._memory_wait_s(slot, now)
        return max(LEAST_WAIT_S, wait_s)

    # --- within ---

    def _serve(self, now: float) -> None:
        """Load the next model, or get the memory for it."""
        is_loading = any(slot.state is ModelState.LOADING for slot in self.slots.values())
        while (slot := self._next()) is not None:
            if slot.state is ModelState.DRAINING and not slot.is_dismissed:
                slot.enter(ModelState.READY)  # the one that it was drained for waits no longer
                self._grant_all(slot)
            elif (most_bytes := self._most_bytes(slot)) < (slot.num_bytes or 0):
                self.failed(slot.name, _too_large(slot, most_bytes, self.budget_bytes))
            else:
                break
        if slot is None:
            self._recall()
        elif slot.state is ModelState.QUEUED and not is_loading:
            self._load_or_make_room(slot, now)
        self._make_room(self.used_bytes - self.budget_bytes, now)

    def _most_bytes(self, slot: Slot) -> int:
        """Memory that a model could ever have beside the pinned ones."""
        pinned = (one.num_bytes or 0 for one in self.slots.values() if one.is_pinned and one is not slot)
        return self.budget_bytes - sum(pinned)

    def _load_or_make_room(self, slot: Slot, now: float) -> None:
        free_bytes, needed_bytes = self.budget_bytes - self.used_bytes, slot.num_bytes or 0
        if needed_bytes <= free_bytes:
            slot.enter(ModelState.LOADING)
            slot.stay += 1
            slot.users, slot.loading_s, slot.is_dismissed = 0, now, False
            self._orders.append(Order(OrderKind.LOAD, slot.name))
        else:
            self._make_room(needed_bytes - free_bytes, now)

    def _make_room(self, missing_bytes: int, now: float) -> None:
        """Unload so many bytes beyond those that are on their way, if that can be done now."""
        leaving = (ModelState.DRAINING, ModelState.UNLOADING)
        missing_bytes -= sum(slot.held_bytes for slot in self.slots.values() if slot.state in leaving)
        for slot in self._victims(missing_bytes, now) if missing_bytes > 0 else ():
            if slot.users:
                slot.enter(ModelState.DRAINING)
            else:
                self._unload(slot)

    def _victims(self, missing_bytes: int, now: float) -> list[Slot]:
        """The models to unload for so many bytes; none when these cannot be had now."""
        idle = sorted(self._idle(), key=lambda slot: slot.used_s)
        busy = [
            slot for slot in self.slots.values()
            if slot.state is ModelState.READY and slot.users and not slot.is_pinned
            and now - slot.ready_s >= self._busy_turn_s
        ]  # fmt: skip
        chosen: list[Slot] = []
        for slot in (*idle, *sorted(busy, key=lambda slot: slot.ready_s)):
            if missing_bytes > 0:
                chosen.append(slot)
                missing_bytes -= slot.held_bytes
        if missing_bytes > 0:
            return []
        spare_bytes = -missing_bytes
        for slot in list(chosen):  # a small one that was chosen before a large one may stay
            if slot.held_bytes <= spare_bytes:
                chosen.remove(slot)
                spare_bytes -= slot.held_bytes
        return chosen

    def _recall(self) -> None:
        """Nothing waits for memory: what drains for another stays."""
        for slot in self.slots.values():
            if slot.state is ModelState.DRAINING and not slot.is_dismissed:
                slot.enter(ModelState.READY)

    def _unload(self, slot: Slot) -> None:
        slot.enter(ModelState.UNLOADING)
        self._orders.append(Order(OrderKind.UNLOAD, slot.name))

    def _idle(self) -> list[Slot]:
        """Models that may be unloaded at once."""
        return [
            slot for slot in self.slots.values()
            if slot.state is ModelState.READY and not slot.users and not slot.is_pinned
        ]  # fmt: skip

    def _is_expired(self, slot: Slot, now: float) -> bool:
        if self._idle_unload_s is None or slot.state is not ModelState.READY or slot.users or slot.is_pinned:
            return False
        return now - slot.used_s >= self._idle_unload_s

    def _waiting_in_order(self) -> list[Slot]:
        """Models that requests wait for and that do not load yet, the next first."""
        waiting = [slot for slot in self.slots.values() if slot.waiting and slot.state is not ModelState.LOADING]
        return sorted(waiting, key=lambda slot: slot.waits_since_s)

    def _next(self) -> Slot | None:
        """The model that is next; those whose size is not known yet are left out."""
        return next((slot for slot in self._waiting_in_order() if slot.num_bytes is not None), None)

    def _grant(self, slot: Slot, ticket: Ticket) -> None:
        slot.users += 1
        ticket.stay = slot.stay
        ticket.on_change()

    def _grant_all(self, slot: Slot) -> None:
        waiting, slot.waiting = slot.waiting, {}
        for ticket in waiting:
            self._grant(slot, ticket)

    def _refuse_all(self, slot: Slot, error: Exception) -> None:
        waiting, slot.waiting = slot.waiting, {}
        for ticket in waiting:
            ticket.error = error
            ticket.on_change()

    def _note_failure(self, slot: Slot, error: Exception) -> None:
        slot.failure = error
        slot.num_failures += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(16, slot.num_failures - 1))
        slot.retry_s = self._clock() + pause_s

    def _load_s(self, slot: Slot) -> float:
        return self.load_times.predict(slot.name, slot.file_bytes)

    def _left_s(self, slot: Slot, now: float) -> float:
        """Of a load that has begun."""
        return max(0.0, self._load_s(slot) - (now - slot.loading_s))

    def _memory_wait_s(self, slot: Slot, now: float) -> float:
        """Until models in memory may be drained, where idle ones do not suffice."""
        leaving = (ModelState.DRAINING, ModelState.UNLOADING)
        coming = sum(one.held_bytes for one in self.slots.values() if one.state in leaving)
        free = self.budget_bytes - self.used_bytes + coming + sum(one.held_bytes for one in self._idle())
        busy = [one for one in self.slots.values() if one.state is ModelState.READY and one.users and not one.is_pinned]
        wait_s = 0.0
        for one in sorted(busy, key=lambda one: one.ready_s):
            if (slot.num_bytes or 0) <= free:
                break
            wait_s = max(wait_s, one.ready_s + self._busy_turn_s - now)
            free += one.held_bytes
        return wait_s


def _too_large(slot: Slot, most_bytes: int, budget_bytes: int) -> NotEnoughMemoryError:
    assert slot.num_bytes is not None, "it was compared"
    given = format_bytes(budget_bytes)
    left = "" if most_bytes == budget_bytes else f", of which pinned models leave {format_bytes(max(0, most_bytes))}"
    return NotEnoughMemoryError(
        f"model {slot.name} takes {format_bytes(slot.num_bytes)}; memory_budget is {given}{left}",
        hint=f"raise memory_budget, or give {slot.name} a smaller max_model_len, kv_cache_memory_bytes or quantization",
        field="memory_budget",
    )
