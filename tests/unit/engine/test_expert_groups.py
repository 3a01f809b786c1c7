"""Cores that share experts: they are of one generation, and one that ends unasked takes the others with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from quire.core.expert_group import ExpertGroup
from quire.engine.data_parallel.expert_groups import EndCallback, ExpertGroups


class FakeCore:
    """A core's process; `end` is its end."""

    def __init__(self, group: ExpertGroup, on_end: EndCallback) -> None:
        self.group = group
        self.reason: str | None = None
        self._on_end = on_end
        self.inode = os.fstat(group.fd).st_ino

    def end_with_group(self, reason: str) -> None:
        self.reason = self.reason or reason

    def end(self, why: str | None = None) -> None:
        self._on_end(why)

    @property
    def has_memory(self) -> bool:
        try:
            return os.fstat(self.group.fd).st_ino == self.inode
        except OSError:
            return False


def launcher(count: int = 2) -> Callable[[int], Any]:
    groups = ExpertGroups(count, 5.0)
    return lambda replica: groups.launch(replica, FakeCore)  # type: ignore[arg-type, return-value]


def test_replicas_of_a_generation_share_memory_and_have_a_bell_each():
    launch = launcher(3)
    cores = [launch(replica) for replica in range(3)]
    assert [core.group.replica for core in cores] == [0, 1, 2] and cores[0].group.num_replicas == 3
    assert len({core.inode for core in cores}) == 1 and len(set(cores[0].group.fds)) == 4
    for core in cores:
        assert core.has_memory
        core.end()
    assert not cores[0].has_memory and all(core.reason is None for core in cores)


def test_one_that_ends_unasked_ends_the_others_and_all_begin_anew_together():
    launch = launcher()
    old = [launch(0), launch(1)]
    old[1].end("it was killed")
    assert "replica 1" in old[0].reason and "it was killed" in old[0].reason and old[0].has_memory
    first = launch(1)  # while the other one is still ending
    old[0].end("killed with its group")
    second = launch(0)
    assert first.inode == second.inode and first.reason is second.reason is None
    first.end("it could not be started")
    assert "replica 1" in second.reason
    second.end("killed with its group")
    again = [launch(0), launch(1)]
    assert again[0].inode == again[1].inode and again[0].reason is None
    for core in again:
        core.end()
        assert again[0].reason is None, "one that is asked to end does not end the others at once"


def test_a_replica_that_is_started_anew_does_not_join_those_that_wait_for_the_one_before():
    launch = launcher()
    old = [launch(0), launch(1)]
    old[0].end()
    new = launch(0)
    assert old[1].reason is not None and new.inode != old[1].inode
    assert launch(1).inode == new.inode
