"""What the processes of engine cores take, as records that can cross between processes. Values only."""

from __future__ import annotations

import msgspec


class CoreProcesses(msgspec.Struct, frozen=True):
    """The processes of one engine core.

    Attributes:
        engine_index: of the core among those of its model.
        pids: of the ranks that run on this machine, in their order; the first is the core's own.
        memory: bytes of the core's process by the label of their `MemoryPart`, as it showed them last.
        silence_s: for which nothing has come from a rank of another machine, the longest.
        num_reports: of crashes of this core and of those before it, written so far.
    """

    engine_index: int
    pids: list[int]
    memory: dict[str, int] = {}
    silence_s: float = 0.0
    num_reports: int = 0


class RankUsage(msgspec.Struct, frozen=True):
    """One process of an engine core.

    Attributes:
        engine, rank: of the core, and of the process within it.
        rss_bytes: resident memory; pss_bytes: the same with shared pages divided among their processes.
        huge_bytes: of it, in huge pages.
        swapped_bytes: moved to the machine's swap.
        user_s, system_s: CPU time since its start.
        memory, silence_s: as `CoreProcesses`; of rank 0.
    """

    engine: int
    rank: int
    pid: int
    rss_bytes: int
    pss_bytes: int
    huge_bytes: int
    swapped_bytes: int
    user_s: float
    system_s: float
    num_threads: int
    num_fds: int
    minor_faults: int
    major_faults: int
    memory: dict[str, int] = {}
    silence_s: float = 0.0
