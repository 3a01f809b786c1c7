"""The closed list of classes in a recording has every class that can be part of a scheduler's state."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import quire.kv_cache
import quire.scheduler
from quire.flight_recorder import state_classes
from quire.flight_recorder.state_classes import ENUM_BY_NAME, OBJECT_BY_NAME, STRUCT_BY_NAME, name_of

NOT_STATE = {
    "Advanced", "Blocked", "Candidate", "ConnectorTier", "Continuation", "ExternalHit", "FilledBlocks", "KVTier",
    "LocalAttentionManager", "ManagerParts", "BlockDemand", "Offloading", "PlannedRequests",
    "RequestGroup", "RowBlocks", "Sampled", "SchedulerSetup", "TierStack",
    "Step", "StepBudget", "StepPlan", "Stop", "SwapCopies", "WantedTokens", "_Drafted", "_MissingBlock",
    "DraftLooks", "_Look", "PlacedPrefixes", "Placement", "_Load", "_Placed",
}  # fmt: skip
"""What lives within one step, abstract bases, what a scheduler is made from, tiers, which are never recorded, and what
stands before schedulers."""


def classes_of(package: ModuleType) -> Iterator[Any]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        found = importlib.import_module(module.name)
        yield from (one for one in vars(found).values() if isinstance(one, type) and one.__module__ == module.name)


def test_every_class_of_the_scheduler_and_the_cache_is_listed_or_no_state():
    listed = {**ENUM_BY_NAME, **STRUCT_BY_NAME, **OBJECT_BY_NAME}
    missing = [
        name_of(kind)
        for package in (quire.scheduler, quire.kv_cache)
        for kind in classes_of(package)
        if not getattr(kind, "_is_protocol", False) and name_of(kind) not in listed and kind.__name__ not in NOT_STATE
    ]
    assert not missing, (
        f"{missing}: add them to quire/flight_recorder/state_classes.py (a scheduler keeps them between steps), or to "
        "NOT_STATE here (it does not); a recorder stops at a class that is not listed"
    )


def test_each_listed_class_stands_under_its_own_name_and_kind():
    assert all(issubclass(kind, enum.Enum) for kind in ENUM_BY_NAME.values())
    assert not any(issubclass(kind, (enum.Enum, BaseException, type)) for kind in OBJECT_BY_NAME.values())
    kinds = [*state_classes.ENUMS, *state_classes.STRUCTS, *state_classes.OBJECTS]
    assert len(kinds) == len(ENUM_BY_NAME) + len(STRUCT_BY_NAME) + len(OBJECT_BY_NAME)
    assert all(kind.__module__.startswith("quire.") for kind in kinds)
