"""The limits of tenants and server as one front end keeps them among several: each count is in the ledger.

Made in a front-end process, in place of `Tenant`, `Admission`, `Places` and `BodyBudget`, whose rules hold as they are:
what changes is where the counts are, and that a check and what follows from it are one step under the ledger's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from quire.config.server import LimitsConfig
from quire.config.tenants import TenantLimits
from quire.server.front_ends.ledger import MAX_TICKETS, InUse, Ledger, SlotWord
from quire.server.http.admission import Admission, Ticket
from quire.server.http.body_budget import BodyBudget, BodyLease
from quire.server.http.errors import OVERLOADED, ApiError
from quire.server.http.places import Places
from quire.server.http.rate_limits import Bucket
from quire.server.http.tenants import Charge, Tenant


class SharedBucket(Bucket):
    """A bucket in the ledger, full when it is new there.

    Args:
        ledger: has it.
        tenant, kind: whose, and which of its two.
        per_minute, clock: as `Bucket`.
    """

    def __init__(self, ledger: Ledger, tenant: int, kind: int, per_minute: int, clock: Callable[[], float]) -> None:
        self._ledger, self._tenant, self._kind = ledger, tenant, kind
        with ledger.lock:
            used = ledger.bucket(tenant, kind)
            super().__init__(per_minute, clock)
            if used != (0, 0):
                self._write(*used)
            else:
                self._write(self._level, self._time_us)

    def _read(self) -> tuple[int, int]:
        return self._ledger.bucket(self._tenant, self._kind)

    def _write(self, level: int, time_us: int) -> None:
        self._ledger.set_bucket(self._tenant, self._kind, level, time_us)


class SharedTenant(Tenant):
    """A tenant of all front ends."""

    def __init__(self, ledger: Ledger, name: str, limits: TenantLimits, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self.number = ledger.tenant(name)
        super().__init__(name, limits, clock)

    @property
    def num_requests(self) -> int:
        """As `Tenant`, at all front ends."""
        return self._ledger.in_use(self.number, InUse.REQUESTS)

    @property
    def num_answers(self) -> int:
        """As `Tenant`, at all front ends."""
        return self._ledger.in_use(self.number, InUse.ANSWERS)

    def set_limits(self, limits: TenantLimits) -> None:
        """As `Tenant`."""
        with self._ledger.lock:
            super().set_limits(limits)

    def begin(self, num_tokens: int, num_prompts: int = 1) -> Charge:
        """As `Tenant`."""
        with self._ledger.lock:
            return super().begin(num_tokens, num_prompts)

    def enter(self, num_answers: int, num_tokens: int, charge: Charge | None = None) -> None:
        """As `Tenant`."""
        with self._ledger.lock:
            super().enter(num_answers, num_tokens, charge)

    def charge(self, num_tokens: int) -> None:
        """As `Tenant`."""
        if self._tokens is not None:
            with self._ledger.lock:
                super().charge(num_tokens)

    def _count(self, num_requests: int, num_answers: int) -> None:
        self._ledger.use(self.number, InUse.REQUESTS, num_requests)
        self._ledger.use(self.number, InUse.ANSWERS, num_answers)

    def _new_bucket(self, kind: int, per_minute: int) -> Bucket:
        return SharedBucket(self._ledger, self.number, kind, per_minute, self._clock)


class SharedAdmission(Admission):
    """Counts the answers of all front ends."""

    def __init__(
        self, ledger: Ledger, limits: LimitsConfig, max_num_seqs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(limits, max_num_seqs, clock)
        self._ledger = ledger
        self._rows: dict[Ticket, int] = {}
        self._free: list[int] = []
        self._known: dict[int, Tenant] = {}

    @property
    def num_answers(self) -> int:
        """As `Admission`, at all front ends."""
        return self._ledger.total(SlotWord.NUM_ANSWERS)

    @property
    def num_tokens(self) -> int:
        """As `Admission`, at all front ends."""
        return self._ledger.total(SlotWord.NUM_TOKENS)

    def begin(self, num_answers: int, num_tokens: int, tenant: Tenant, num_prompts: int = 1) -> Charge:
        """As `Admission`."""
        self._learn(tenant)
        with self._ledger.lock:
            return super().begin(num_answers, num_tokens, tenant, num_prompts)

    def enter(
        self,
        num_answers: int,
        num_tokens: int,
        tenant: Tenant | None = None,
        max_tokens: int | None = None,
        charge: Charge | None = None,
    ) -> Ticket:
        """As `Admission`."""
        if not self._free and len(self._rows) >= MAX_TICKETS:
            raise ApiError(OVERLOADED, "too many requests run at once", retry_after_s=1)
        self._learn(tenant)
        with self._ledger.lock:
            return super().enter(num_answers, num_tokens, tenant, max_tokens, charge)

    def _add(self, ticket: Ticket) -> None:
        super()._add(ticket)
        place = self._rows[ticket] = self._free.pop() if self._free else len(self._rows)
        number = ticket.tenant.number if isinstance(ticket.tenant, SharedTenant) else -1
        self._ledger.put_ticket(place, ticket.num_answers, ticket.num_tokens, ticket.max_tokens, number)

    def _remove(self, ticket: Ticket) -> None:
        super()._remove(ticket)
        place = self._rows.pop(ticket)
        self._free.append(place)
        self._ledger.remove_ticket(place)

    def _newest_first(self) -> Iterable[Ticket]:
        for num_answers, num_tokens, max_tokens, tenant in self._ledger.tickets():
            yield Ticket(num_answers, num_tokens, self._known.get(tenant), max_tokens)

    def _learn(self, tenant: Tenant | None) -> None:
        if isinstance(tenant, SharedTenant):
            self._known[tenant.number] = tenant


class SharedPlaces(Places):
    """Places of all front ends, given in the order in which prompts began to wait.

    Args:
        ledger: has the counts.
        max_num_seqs: as `Places`.
        wake: lets the other front ends know that they may have what they wait for.
    """

    def __init__(self, ledger: Ledger, max_num_seqs: int, wake: Callable[[], None]) -> None:
        super().__init__(max_num_seqs)
        self._ledger = ledger
        self._wake = wake

    @property
    def num_free(self) -> int:
        """As `Places`."""
        return self._most - self._ledger.total(SlotWord.PLACES)

    def try_take(self, count: int) -> bool:
        """As `Places`."""
        with self._ledger.lock:
            return not any(self._ledger.others(SlotWord.WAITING_SINCE)) and super().try_take(count)

    def give_back(self, count: int) -> None:
        """As `Places`."""
        self._note_taken(-count)
        self._serve()
        self._wake_others()

    def serve(self) -> None:
        """As `Places`."""
        before = self._ledger.of_slot(SlotWord.WAITING_SINCE)
        self._serve()
        if self._ledger.of_slot(SlotWord.WAITING_SINCE) != before:
            self._wake_others()

    def _serve(self) -> None:
        with self._ledger.lock:
            self._show_first()
            while self._waiting and self._has_room(self._waiting[0].count):
                waiter = self._waiting.popleft()
                self._note_taken(waiter.count)
                waiter.turn.set_result(None)
                self._show_first()

    def _wake_others(self) -> None:
        if any(self._ledger.others(SlotWord.WAITING_SINCE)):
            self._wake()

    def _has_room(self, count: int) -> bool:
        own = self._ledger.of_slot(SlotWord.WAITING_SINCE)
        is_first = all(not since or (own and own <= since) for since in self._ledger.others(SlotWord.WAITING_SINCE))
        return is_first and count <= self.num_free

    def _note_taken(self, count: int) -> None:
        self._ledger.add(SlotWord.PLACES, count)

    def _show_first(self) -> None:
        """Since when the first one waits here."""
        while self._waiting and self._waiting[0].turn.done():
            self._waiting.popleft()
        self._ledger.set(SlotWord.WAITING_SINCE, self._waiting[0].since_ns if self._waiting else 0)


class SharedBodyBudget(BodyBudget):
    """The bytes of the bodies of all front ends. Each gives up its own bodies that do not arrive.

    Args:
        ledger: has the counts.
        number_of: a tenant's number, by its name.
        max_bytes, has_several, clock: as `BodyBudget`.
        wake: has the other front ends give up such bodies.
    """

    def __init__(
        self,
        ledger: Ledger,
        number_of: Callable[[str], int],
        max_bytes: int,
        has_several: Callable[[], bool],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_bytes, has_several, clock)
        self._ledger = ledger
        self._number_of = number_of
        self._wake = wake

    def take(self, lease: BodyLease, num_bytes: int) -> None:
        """As `BodyBudget`."""
        before = lease.num_bytes
        try:
            with self._ledger.lock:
                super().take(lease, num_bytes)
                self._note(lease.tenant, lease.num_bytes - before)
        except ApiError:
            self._wake()
            raise

    def give_back(self, lease: BodyLease) -> None:
        """As `BodyBudget`."""
        num_bytes = lease.num_bytes
        super().give_back(lease)
        if num_bytes:
            self._note(lease.tenant, -num_bytes)

    def _note(self, tenant: str, num_bytes: int) -> None:
        self._ledger.add(SlotWord.BODY_BYTES, num_bytes)
        self._ledger.use(self._number_of(tenant), InUse.BODY_BYTES, num_bytes)

    def _held(self) -> int:
        return self._ledger.total(SlotWord.BODY_BYTES)

    def _held_by(self, tenant: str) -> int:
        return self._ledger.in_use(self._number_of(tenant), InUse.BODY_BYTES)
