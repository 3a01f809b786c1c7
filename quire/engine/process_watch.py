"""ProcessWatch: what the processes of engine cores take, read from the system when someone asks.

Made for each model by the server. Needs nothing of a core, which may run a long step, or hang. What the kernel counts
is read at once, what it must add up page by page on a thread and seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from quire.core.process_stats import CoreProcesses, RankUsage
from quire.utils.process import MappedMemory, ProcessCounters, read_counters, read_mapped

INTERVAL_S = 0.5
MAPPED_INTERVAL_S = 15.0
UNKNOWN = MappedMemory(0, 0, 0)


class ProcessWatch:
    """Looks at processes.

    Args:
        source: the engine cores of now, each asked to show its memory anew.
        clock: seconds.

    Attributes:
        usages: as they were found last; processes that have ended since are left out at the next look.
        cores: as the source had them then.
    """

    def __init__(
        self, source: Callable[[], Sequence[CoreProcesses]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._clock = clock
        self._looked_s = self._mapped_s = float("-inf")
        self._mapped: dict[int, MappedMemory] = {}
        self._mapping: asyncio.Task[None] | None = None
        self.usages: list[RankUsage] = []
        self.cores: Sequence[CoreProcesses] = ()

    async def look(self) -> Sequence[RankUsage]:
        """Every process, as it is now or was less than `INTERVAL_S` ago."""
        now_s = self._clock()
        if now_s - self._looked_s < INTERVAL_S:
            return self.usages
        self._looked_s = now_s
        cores = self.cores = self._source()
        pids = [pid for core in cores for pid in core.pids]
        if self._mapping is None and (now_s - self._mapped_s >= MAPPED_INTERVAL_S or set(pids) - self._mapped.keys()):
            self._mapped_s = now_s
            self._mapping = asyncio.ensure_future(self._read_mapped(pids))
        if self._mapping is not None:
            await asyncio.shield(self._mapping)
        self.usages = [
            self._usage(core, rank, found)
            for core in cores
            for rank, pid in enumerate(core.pids)
            if (found := read_counters(pid)) is not None
        ]
        return self.usages

    async def _read_mapped(self, pids: Sequence[int]) -> None:
        try:
            self._mapped = await asyncio.to_thread(lambda: {pid: read_mapped(pid) or UNKNOWN for pid in pids})
        finally:
            self._mapping = None

    def _usage(self, core: CoreProcesses, rank: int, found: ProcessCounters) -> RankUsage:
        mapped = self._mapped.get(found.pid, UNKNOWN)
        return RankUsage(
            engine=core.engine_index, rank=rank, pid=found.pid, rss_bytes=found.rss_bytes, pss_bytes=mapped.pss_bytes,
            huge_bytes=mapped.huge_bytes, swapped_bytes=mapped.swapped_bytes, user_s=found.user_s,
            system_s=found.system_s, num_threads=found.num_threads, num_fds=found.num_fds,
            minor_faults=found.minor_faults, major_faults=found.major_faults, memory={} if rank else core.memory,
            silence_s=0.0 if rank else core.silence_s,
        )  # fmt: skip
