"""Seat: a process's place in a group, before it has the means to communicate. Made by an executor."""

from __future__ import annotations

from dataclasses import dataclass

from quire.distributed.host_links import HostPlan, HostSockets
from quire.distributed.shared_memory import DEFAULT_CAPACITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a group: the ranks of the first pipeline stage come first, then those of the second, and so on.

    Attributes:
        fd: of the region that the ranks share (`shared_memory.make_region`).
        num_stages: pipeline stages, of equally many ranks.
        stage_fd: of the region that the ranks of this stage share; None = `fd`, or the stage is one rank.
        capacity: of the regions.
        cache_fds: of memory for the KV cache of each rank, which rank 0 maps too; empty = every cache is private.
        timeout_s: for which a rank waits for another.
        plan, sockets: where the ranks are on several machines; `fd` is of those of this one.
    """

    rank: int
    size: int
    fd: int
    num_stages: int = 1
    stage_fd: int | None = None
    capacity: int = DEFAULT_CAPACITY
    timeout_s: float = 60.0
    cache_fds: tuple[int, ...] = ()
    plan: HostPlan | None = None
    sockets: HostSockets | None = None

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, which compute its layers together."""
        return self.size // self.num_stages

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.rank // self.stage_size

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this machine."""
        if self.plan is None:
            return list(range(self.size))
        return [rank for rank, host in enumerate(self.plan.hosts) if host == self.plan.hosts[self.rank]]
