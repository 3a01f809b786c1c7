"""Ray's contract as the executor uses it: actors are threads of this process, machines are names.

Put in the place of the package by `fake_ray`. An actor runs one method after the other; `kill` ends it in the middle,
as far as its caller can see. Processes are tried by `make test-ray`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


class RayError(Exception):
    """Of ray.exceptions."""


class GetTimeoutError(RayError, TimeoutError):
    """Of ray.exceptions."""


@dataclass
class Strategy:
    """PlacementGroupSchedulingStrategy."""

    placement_group: Any
    placement_group_bundle_index: int


class Actor:
    """A handle, and what it stands for."""

    def __init__(self, ray: FakeRay, instance: Any, node: int) -> None:
        self.ray, self.instance, self.node = ray, instance, node
        self.dead: Future[None] = Future()
        self.thread = ThreadPoolExecutor(1)
        ray.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.instance, name)

        def remote(*args: Any) -> tuple[Actor, Future[Any]]:
            if name == "look":  # as seen on the machine that it is on
                args = (f"node{self.node}", "127.0.0.1")
            return self, self.thread.submit(method, *args)

        return types.SimpleNamespace(remote=remote)


class FakeRay(types.ModuleType):
    """The package, over machines with so many CPUs; the first is this one."""

    def __init__(self, *cpus: float) -> None:
        super().__init__("ray")
        self.cpus, self.free = list(cpus), list(cpus)
        self.actors: list[Actor] = []
        self.groups: list[tuple[list[int], list[float]]] = []
        self.is_started = False
        self.util = types.SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1", placement_group=self.placement_group,
            remove_placement_group=self.remove_placement_group,
        )  # fmt: skip
        self.exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def is_initialized(self) -> bool:
        return self.is_started

    def init(self, address: str, configure_logging: bool) -> None:
        if not self.cpus:
            raise ConnectionError("Could not find any running Ray instance.")
        self.is_started = True

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "node0")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": cpus}, "NodeManagerAddress": f"10.0.0.{node}"}
            for node, cpus in enumerate(self.cpus)
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.free)}

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        places, taken, free = [], [], list(self.free)
        for bundle in bundles:
            wanted, is_pinned = bundle["CPU"], "node:127.0.0.1" in bundle
            fitting = [node for node, cpus in enumerate(free) if cpus >= wanted and (not is_pinned or node == 0)]
            if not fitting:
                return types.SimpleNamespace(ready=lambda: (None, Future()), number=-1)
            free[fitting[0]] -= wanted
            places.append(fitting[0])
            taken.append(wanted)
        self.free = free
        self.groups.append((places, taken))
        done: Future[None] = Future()
        done.set_result(None)
        return types.SimpleNamespace(ready=lambda: (None, done), number=len(self.groups) - 1)

    def remove_placement_group(self, group: Any) -> None:
        if group.number >= 0:
            for node, cpus in zip(*self.groups[group.number], strict=True):
                self.free[node] += cpus

    def remote(self, kind: type) -> Any:
        def options(num_cpus: float, max_restarts: int, scheduling_strategy: Strategy) -> Any:
            places = self.groups[scheduling_strategy.placement_group.number][0]
            node = places[scheduling_strategy.placement_group_bundle_index]
            return types.SimpleNamespace(remote=lambda: Actor(self, kind(), node))

        return types.SimpleNamespace(options=options)

    def get(self, reference: tuple[Actor | None, Future[Any]], timeout: float | None) -> Any:
        actor, future = reference
        ends = [future] if actor is None else [future, actor.dead]
        done = wait(ends, timeout if actor is not None else 0, return_when="FIRST_COMPLETED").done
        if not done:
            raise GetTimeoutError
        if future in done:
            return future.result()
        raise RayError("The actor died unexpectedly before finishing this task.")

    def kill(self, actor: Actor) -> None:
        if not actor.dead.done():
            actor.dead.set_result(None)
        actor.thread.shutdown(wait=False)


@contextmanager
def fake_ray(*cpus: float) -> Iterator[FakeRay]:
    """Ray is there inside, with machines of so many CPUs."""
    ray = FakeRay(*cpus)
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = Strategy  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        patch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        yield ray
