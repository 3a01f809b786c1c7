"""How much CPU time a tenant's grammars may take at ordinary priority."""

from __future__ import annotations

from quire.structured_output.compile.fast_budget import BURST_S, SHARE, FastBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_that_took_its_burst_waits_until_its_share_has_refilled():
    clock = Clock()
    budget = FastBudget(clock)
    budget.charge("mallory", BURST_S / 2)
    assert not budget.is_spent("mallory")
    budget.charge("mallory", BURST_S / 2 + 0.05)
    assert budget.is_spent("mallory") and not budget.is_spent("bob")
    clock.now += 0.04 / SHARE
    assert budget.is_spent("mallory")
    clock.now += 0.02 / SHARE
    assert not budget.is_spent("mallory")


def test_a_pause_earns_no_more_than_a_burst():
    clock = Clock()
    budget = FastBudget(clock)
    budget.charge("mallory", 0.01)
    clock.now += 3600.0
    budget.charge("mallory", BURST_S + 0.01)
    assert budget.is_spent("mallory")
