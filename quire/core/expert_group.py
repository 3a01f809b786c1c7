"""ExpertGroup: what engine cores share whose experts are divided among all of them. A value; made where they start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class ExpertGroup(msgspec.Struct, frozen=True):
    """One replica's place in a group of replicas that compute experts together.

    Attributes:
        replica: its number.
        fd: of the memory that all ranks of all replicas share; inherited.
        bells: for each replica an eventfd, by which others wake it; inherited.
        timeout_s: for which a rank waits for another.
    """

    replica: int
    fd: int
    bells: list[int]
    timeout_s: float

    @property
    def num_replicas(self) -> int:
        """In the group."""
        return len(self.bells)

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that the processes of the replica inherit."""
        return (self.fd, *self.bells)


class LockStep(Protocol):
    """The passes of a group of replicas, seen by an engine core: all replicas take part in each, or none.

    A core that has nothing to compute waits for its bell, too, and calls `join`.
    """

    @property
    def bell(self) -> int:
        """A descriptor that can be read when others may have begun a pass."""
        ...

    @property
    def num_passes(self) -> int:
        """In which this replica has taken part."""
        ...

    def watch(self, on_pass: Callable[[int], None]) -> None:
        """Call `on_pass` with the tokens of all replicas when a pass begins."""
        ...

    def join(self) -> bool:
        """Take part in a pass that another replica has begun, without tokens; False where none has.

        Raises:
            EngineDeadError: another replica has ended.
        """
        ...
