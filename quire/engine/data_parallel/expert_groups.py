"""ExpertGroups: starts cores that share experts. They begin together, and when one ends unasked, so do the others.

Called by `mp_factory` and its launchers. Owns the memory and the bells of each generation of cores, until its processes
have ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.core.expert_group import ExpertGroup

if TYPE_CHECKING:
    from quire.engine.core_launcher import CoreProcess

EndCallback = Callable[[str | None], None]
"""Called when a core's process has ended: why, or None where it was asked to."""


class _Generation:
    """Cores that compute together.

    Attributes:
        cores: by replica.
        num_running: of these, how many have not ended.
        is_over: one has ended, so no other joins.
    """

    def __init__(self, num_replicas: int) -> None:
        self._fds = [os.memfd_create("quire-experts")]
        self._fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_replicas)]
        self.cores: dict[int, CoreProcess] = {}
        self.num_running = 0
        self.is_over = False

    def group(self, replica: int, timeout_s: float) -> ExpertGroup:
        return ExpertGroup(replica, self._fds[0], self._fds[1:], timeout_s)

    def end(self, reason: str) -> None:
        """End all cores; harmless when repeated."""
        self.is_over = True
        for core in self.cores.values():
            core.end_with_group(reason)

    def note_end(self) -> None:
        """The process of a core has ended."""
        self.is_over = True
        self.num_running -= 1
        if not self.num_running:
            for fd in self._fds:
                os.close(fd)


class ExpertGroups:
    """One generation of cores after another; called from any thread.

    Args:
        num_replicas: in a generation.
        timeout_s: for which a rank waits for another.
    """

    def __init__(self, num_replicas: int, timeout_s: float) -> None:
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._generation: _Generation | None = None

    def launch(self, replica: int, make: Callable[[ExpertGroup, EndCallback], CoreProcess]) -> CoreProcess:
        """A core for a replica, in the generation that lacks one.

        Args:
            make: starts the process, which inherits the group's descriptors.
        """
        with self._lock:
            assert 0 <= replica < self._num_replicas, "groups are not scaled"
            generation = self._generation
            if generation is None or generation.is_over or replica in generation.cores:
                if generation is not None:
                    generation.end("a replica that has experts of all is started anew")
                generation = self._generation = _Generation(self._num_replicas)
            group, on_end = generation.group(replica, self._timeout_s), partial(self._note_end, generation, replica)
            generation.num_running += 1
            core = generation.cores[replica] = make(group, on_end)
            return core

    def _note_end(self, generation: _Generation, replica: int, why: str | None) -> None:
        with self._lock:
            if why is not None:
                generation.end(f"replica {replica}, which has experts of all, has ended: {why}")
            generation.note_end()
