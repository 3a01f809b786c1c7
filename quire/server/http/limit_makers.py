"""LimitMakers: makes what counts for the limits of a server. Several front ends on one port have others than one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.config.server import LimitsConfig
from quire.server.http.admission import Admission
from quire.server.http.body_budget import BodyBudget
from quire.server.http.places import Places
from quire.server.http.tenants import MakeTenant, Tenant


@dataclass(frozen=True, slots=True)
class LimitMakers:
    """One callable for each class, with the arguments of that class."""

    tenant: MakeTenant = Tenant
    admission: Callable[[LimitsConfig, int], Admission] = Admission
    places: Callable[[int], Places] = Places
    body_budget: Callable[[int, Callable[[], bool]], BodyBudget] = BodyBudget


OWN_LIMITS = LimitMakers()
"""Of a server that is alone."""
