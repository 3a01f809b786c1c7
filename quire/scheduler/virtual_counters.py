"""VirtualCounters: what each tenant has been served, so that the one served least is next.

Owned by `FairOrder`. A tenant is a slot of a few small arrays; names are known here alone.

Source: Sheng et al. 2024 (Fairness in Serving Large Language Models), Algorithms 2 and 4 (VTC, with weights).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# Service of one token, as in the paper's section 3.1: to compute one of a prompt, and to make one of an answer.
INPUT_COST = 1.0
OUTPUT_COST = 2.0
MAX_IDLE_TENANTS = 256


class VirtualCounters:
    """Service per tenant, divided by the tenant's weight.

    While two tenants both have waiting requests their counters differ by at most the larger of what their requests that
    run at once can cost: max over both of sum(INPUT_COST * prompt + OUTPUT_COST * max_tokens) / weight. Who comes back
    after a pause starts at the least counter of those that wait, so a pause earns nothing.

    Attributes:
        counters: [num_slots] float64.
        weights: [num_slots] float64.
        turns: [num_slots] int64; of equal counters, the larger turn is first: who has just come back.
    """

    def __init__(self) -> None:
        self.counters = np.zeros(8)
        self.weights = np.ones(8)
        self.turns = np.zeros(8, dtype=np.int64)
        self._num_unfinished = np.zeros(8, dtype=np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(7, -1, -1))
        self._last = 0  # the slot that was charged for a prompt last
        self._num_turns = 0
        self._is_shared = False

    def take_over(self, counters: Mapping[str, float]) -> None:
        """Other engines serve the tenants, too: their counters by name, which from now on are lifted by the sender."""
        self._is_shared = True
        for name, counter in counters.items():
            slot = self._slots.get(name)
            if slot is None:
                slot = self._slots[name] = self._new_slot()
            self.counters[slot] = counter

    def slot_of(self, name: str, weight: float) -> int:
        """The slot of a tenant, one of whose requests has arrived; counted until `leave`."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._new_slot()
        self.weights[slot] = weight
        self._num_unfinished[slot] += 1
        return slot

    def leave(self, slot: int) -> None:
        """A request of this tenant has ended."""
        self._num_unfinished[slot] -= 1

    def lift(self, slot: int, waiting: list[int]) -> None:
        """A tenant with no waiting request gets one, beside `waiting` tenants: it has no credit for the time before.

        This is the counter lift of the VTC paper.
        """
        if not self._is_shared:
            floor = float(self.counters[waiting].min() if waiting else self.counters[self._last])
            self.counters[slot] = max(float(self.counters[slot]), floor)
        self._num_turns += 1
        self.turns[slot] = self._num_turns

    def charge_prompt(self, slot: int, num_tokens: int) -> None:
        """A tenant's request begins to run."""
        self.counters[slot] += INPUT_COST * num_tokens / self.weights[slot]
        self._last = slot

    def charge_outputs(self, slots: np.ndarray) -> None:
        """One token for each entry of `slots` ([n] int)."""
        num_tokens = np.bincount(slots, minlength=len(self.counters))
        self.counters += OUTPUT_COST * num_tokens / self.weights

    def least(self, slots: list[int]) -> int:
        """Of these tenants, the one that is next."""
        if len(slots) == 1:
            return slots[0]
        counters, turns = self.counters, self.turns
        return min(slots, key=lambda slot: (counters[slot], -turns[slot]))

    def places(self) -> np.ndarray:
        """[num_slots] int: 0 for the tenant that is next, and so on."""
        places = np.empty(len(self.counters), dtype=np.intp)
        places[np.lexsort((-self.turns, self.counters))] = np.arange(len(places))
        return places

    def _new_slot(self) -> int:
        if len(self._slots) - np.count_nonzero(self._num_unfinished) > MAX_IDLE_TENANTS:
            self._forget_idle()
        if not self._free:
            size = len(self.counters)
            self.counters = np.concatenate([self.counters, np.zeros(size)])
            self.weights = np.concatenate([self.weights, np.ones(size)])
            self.turns = np.concatenate([self.turns, np.zeros(size, dtype=np.int64)])
            self._num_unfinished = np.concatenate([self._num_unfinished, np.zeros(size, dtype=np.int64)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self.counters[slot] = 0.0
        return slot

    def _forget_idle(self) -> None:
        """Forget idle tenants that would be lifted anyway were they to come back now."""
        busy = self._num_unfinished > 0
        busy[self._last] = True
        floor = self.counters[busy].min()
        for name, slot in list(self._slots.items()):
            if not busy[slot] and self.counters[slot] <= floor:
                del self._slots[name]
                self._free.append(slot)
