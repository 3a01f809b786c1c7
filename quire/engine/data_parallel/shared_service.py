"""SharedService: what tenants were served by all replicas together, for fair shares that hold across them.

Made by `Replicas` under the scheduling policy `fair`. Counts as each replica's scheduler does (`VirtualCounters`), from
the steps that come back, and says which counters a replica is to take over: one that serves a tenant alone must know
what the others served it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.stats import EventKind
from quire.core.wire import TenantCounters
from quire.scheduler.virtual_counters import INPUT_COST, OUTPUT_COST, VirtualCounters

EXCHANGE_COST = 256.0
"""Service, in tokens of a prompt, by which a replica's counters may lag behind all service."""


@dataclass(slots=True)
class _Known:
    """A request that has not ended."""

    slot: int
    replica: int
    num_prompt_tokens: int
    has_started: bool = False


class SharedService:
    """Service of tenants over all replicas."""

    def __init__(self) -> None:
        self._counters = VirtualCounters()
        self._requests: dict[int, _Known] = {}
        self._names: dict[int, str] = {}
        self._num_waiting: Counter[int] = Counter()  # slot -> requests that have not started
        self._present: dict[int, Counter[int]] = {}  # replica -> slot -> requests that have not ended
        self._unsent: dict[int, float] = {}  # replica -> service by others since counters were sent to it

    def add_replica(self, replica: int) -> None:
        """A replica whose counters are empty."""
        self._unsent[replica] = EXCHANGE_COST
        self._present.setdefault(replica, Counter())

    def remove_replica(self, replica: int) -> None:
        """A replica is gone."""
        self._unsent.pop(replica, None)

    def add(self, request: EngineCoreRequest, replica: int) -> TenantCounters:
        """A request is about to be sent to a replica; what is to be sent before it."""
        slot = self._counters.slot_of(request.tenant, request.tenant_weight)
        if slot not in self._num_waiting:
            self._counters.lift(slot, list(self._num_waiting))
        self._names[slot] = request.tenant
        self._num_waiting[slot] += 1
        self._present[replica][slot] += 1
        self._requests[request.handle] = _Known(slot, replica, len(request.prompt_token_ids))
        return self._message([slot])

    def move(self, handle: int, replica: int) -> TenantCounters | None:
        """A request is about to be sent to another replica, or to the same again; what is to be sent before it."""
        known = self._requests.get(handle)
        if known is None:
            return None
        _take_one(self._present[known.replica], known.slot)
        self._present[replica][known.slot] += 1
        known.replica = replica
        return self._message([known.slot])

    def remove(self, handle: int) -> None:
        """A request has ended; harmless when repeated."""
        known = self._requests.pop(handle, None)
        if known is not None:
            self._start(known)
            self._counters.leave(known.slot)
            _take_one(self._present[known.replica], known.slot)

    def note_step(self, replica: int, step: EngineCoreOutputs) -> None:
        """A replica has served."""
        service = 0.0
        for event in step.events:
            known = self._requests.get(event.handle)
            if event.kind is EventKind.SCHEDULED and known is not None and not known.has_started:
                self._start(known)
                num_tokens = max(0, known.num_prompt_tokens - event.num_cached_tokens)
                self._counters.charge_prompt(known.slot, num_tokens)
                service += INPUT_COST * num_tokens
        slots = [self._requests[handle].slot for handle in step.handles.tolist() if handle in self._requests]
        if slots:
            self._counters.charge_outputs(np.array(slots, dtype=np.intp))
            service += OUTPUT_COST * len(slots)
        for other in self._unsent:
            if other != replica:
                self._unsent[other] += service
        for end in step.finished:
            self.remove(end.handle)

    def due(self) -> list[tuple[int, TenantCounters]]:
        """(replica, what to send it), for those whose counters are too far from all service."""
        messages = []
        for replica, service in self._unsent.items():
            if service >= EXCHANGE_COST:
                self._unsent[replica] = 0.0
                if len(self._present[replica]) > 1:  # one tenant alone is served whatever its counter is
                    messages.append((replica, self._message(list(self._present[replica]))))
        return messages

    def _message(self, slots: list[int]) -> TenantCounters:
        counters = self._counters.counters
        return TenantCounters({self._names[slot]: float(counters[slot]) for slot in slots})

    def _start(self, known: _Known) -> None:
        if not known.has_started:
            known.has_started = True
            _take_one(self._num_waiting, known.slot)


def _take_one(counts: Counter[int], slot: int) -> None:
    """One less; a slot with none is not there."""
    counts[slot] -= 1
    if not counts[slot]:
        del counts[slot]
