"""TenantShare: whose a request is, as the scheduler needs to know it. Given by the caller of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ValidationError, unknown_name
from quire.utils.checks import check_float, check_text

TENANT_POLICIES = ("fcfs", "priority", "shortest")
"""How a tenant's own requests can be ordered."""
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant, for scheduling_policy="fair".

    Attributes:
        name: identifies the tenant.
        weight: its share of the engine, relative to those of others; MIN_WEIGHT to MAX_WEIGHT.
        policy: the order of its own requests; one of TENANT_POLICIES.
    """

    name: str = ""
    weight: float = 1.0
    policy: str = "fcfs"


NO_TENANT = TenantShare()
"""Of requests that name no tenant; they share as one."""


def check_share(share: TenantShare) -> None:
    """Refuse a share that is none.

    Raises:
        ValidationError: the attribute is named.
    """
    check_text("tenant.name", share.name)
    check_float("tenant.weight", share.weight, minimum=MIN_WEIGHT, maximum=MAX_WEIGHT)
    if share.policy not in TENANT_POLICIES:
        raise unknown_name("tenant.policy", str(share.policy), TENANT_POLICIES, ValidationError)
