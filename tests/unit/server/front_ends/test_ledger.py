"""What front ends share: limits that hold for all together, whoever of them dies when."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

import pytest

from quire.config.server import LimitsConfig
from quire.config.tenants import TenantLimits
from quire.errors import ConfigError
from quire.server.front_ends import ledger as ledgers
from quire.server.front_ends.ledger import InUse, Ledger, SlotWord
from quire.server.front_ends.shared_limits import SharedAdmission, SharedBodyBudget, SharedPlaces, SharedTenant
from quire.server.http.admission import Admission
from quire.server.http.body_budget import BodyBudget
from quire.server.http.errors import ApiError
from quire.server.http.tenants import Tenant

STOPPED = """
import signal
from quire.server.front_ends.ledger import Ledger
one = Ledger({fd}, 2, 0)
start = one._bucket_at(one.tenant("a"), 1)
one._words[start + 1 + 2 * (1 - one._words[start])] = -1
one.lock.__enter__()
signal.pause()
"""
"""A front end that stops in the middle of a change, with the lock."""


class Clock:
    """Seconds that pass when told to."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def views(count: int = 2) -> tuple[Ledger, list[Ledger]]:
    """The owner's ledger, and those of front ends."""
    owner = Ledger.create(count)
    return owner, [Ledger(owner.fd, count, slot) for slot in range(count)]


def test_front_ends_refuse_together_what_one_would_refuse_alone():
    """The same random requests at one front end, and spread over three: the same answers, to the microsecond."""
    for seed in range(6):
        rng, clock, limits = random.Random(seed), Clock(), LimitsConfig(max_num_queued_reqs=5, max_num_queued_tokens=90)
        of_tenant = TenantLimits(
            requests_per_minute=rng.randint(5, 40), tokens_per_minute=rng.randint(100, 900), max_concurrent=6,
            queue_share=0.8,
        )  # fmt: skip
        _, several = views(3)
        groups = []
        for shared in (several, [None]):
            for one in shared:
                alone = one is None
                tenant = Tenant("a", of_tenant, clock) if alone else SharedTenant(one, "a", of_tenant, clock)
                admission = None if alone else SharedAdmission(one, limits, 3, clock)
                groups.append((tenant, admission))
        pairs = groups[:3]
        single = (groups[3][0], Admission(limits, 3, clock))
        running: list[tuple[SharedAdmission, object, object]] = []
        for _ in range(400):
            clock.seconds += rng.random() * 3
            if running and rng.random() < 0.5:
                admission, ticket, other = running.pop(rng.randrange(len(running)))
                admission.leave(ticket)
                single[1].leave(other)
                continue
            tenant, admission = pairs[rng.randrange(3)]
            num_answers, num_tokens = rng.randint(1, 3), rng.randint(1, 60)
            results = []
            for owner, gate in ((tenant, admission), single):
                try:
                    results.append(gate.enter(num_answers, num_tokens, owner))
                except ApiError as error:
                    results.append((error.reason, error.message, error.retry_after_s))
            if isinstance(results[0], tuple):
                assert results[0] == results[1]
            else:
                assert not isinstance(results[1], tuple)
                running.append((admission, *results))
            assert tenant.headers() == single[0].headers()
            assert admission.num_answers == single[1].num_answers and admission.num_queued == single[1].num_queued


def test_what_a_front_end_held_is_free_when_it_has_ended_and_what_it_used_stays_used():
    owner, (one, other) = views()
    limits = TenantLimits(max_concurrent=3, tokens_per_minute=1000)
    tenants = [SharedTenant(ledger, "a", limits, Clock()) for ledger in (one, other)]
    gates = [SharedAdmission(ledger, LimitsConfig(), 4) for ledger in (one, other)]
    for gate, tenant in zip([gates[0], gates[0], gates[1]], [tenants[0], tenants[0], tenants[1]], strict=True):
        gate.enter(2, 100, tenant)
    with pytest.raises(ApiError, match="3 requests"):
        gates[1].enter(1, 1, tenants[1])
    owner.clear_slot(0)
    assert (tenants[1].num_requests, tenants[1].num_answers, gates[1].num_answers) == (1, 2, 2)
    assert dict(tenants[1].headers())[b"x-ratelimit-remaining-tokens"] == b"700"
    gates[1].enter(1, 1, tenants[1])


def test_a_death_within_a_change_leaves_a_bucket_as_it_was_and_frees_the_lock():
    owner, (_, other) = views()
    bucket_of = SharedTenant(other, "a", TenantLimits(tokens_per_minute=1000), Clock())
    bucket_of.charge(300)
    with subprocess.Popen([sys.executable, "-c", STOPPED.format(fd=owner.fd)], pass_fds=(owner.fd,)) as child:
        while (holder := owner.lock.holder()) is None:
            time.sleep(0.001)
        assert holder == child.pid, "the owner can see who holds it"
        child.kill()
    bucket_of.charge(100)
    assert dict(bucket_of.headers())[b"x-ratelimit-remaining-tokens"] == b"600"


def test_places_are_given_in_the_order_in_which_prompts_began_to_wait_wherever_they_wait():
    async def run() -> None:
        owner, (one, other) = views()
        places: list[SharedPlaces] = []
        woken: list[int] = []
        places += [SharedPlaces(one, 8, lambda: woken.append(1)), SharedPlaces(other, 8, lambda: woken.append(0))]
        assert places[0].try_take(5) and not places[1].try_take(3) and places[1].num_free == 2
        first = asyncio.create_task(places[1].take(4))
        await asyncio.sleep(0)
        second = asyncio.create_task(places[0].take(1))
        await asyncio.sleep(0)
        assert not places[0].try_take(1) and not second.done(), "there is room, and another was here before"
        places[0].give_back(5)
        assert woken[-1] == 1 and not second.done()
        places[1].serve()
        await first
        places[0].serve()
        await second
        third = asyncio.create_task(places[1].take(7))
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        assert places[0].try_take(2) and places[0].num_free == 0, "one that left does not stand in the way"
        owner.clear_slot(1)
        assert places[0].num_free == 4

    asyncio.run(run())


def test_bodies_of_all_front_ends_are_within_the_budget():
    _, (one, other) = views()
    woken: list[None] = []
    budgets: list[BodyBudget] = [
        SharedBodyBudget(ledger, ledger.tenant, 1 << 20, lambda: True, lambda: woken.append(None))
        for ledger in (one, other)
    ]
    leases = [budgets[0].open("a"), budgets[1].open("a"), budgets[1].open("b")]
    leases[0].take(300_000)
    with pytest.raises(ApiError, match="max_bodies_bytes"):
        leases[1].take(300_000)  # a tenant has half
    assert woken
    leases[2].take(300_000)
    assert one.total(SlotWord.BODY_BYTES) == 600_000 and other.in_use(other.tenant("a"), InUse.BODY_BYTES) == 300_000
    for lease in leases:
        lease.close()
    assert one.total(SlotWord.BODY_BYTES) == 0


def test_too_many_tenants_are_refused(monkeypatch):
    monkeypatch.setattr(ledgers, "MAX_TENANTS", 2)
    _, (one, other) = views()
    assert (one.tenant("a"), other.tenant("b"), one.tenant("b"), other.tenant("a")) == (0, 1, 1, 0)
    with pytest.raises(ConfigError, match="2 tenants"):
        one.tenant("c")
