"""SeriesLog: rates and quantiles between looks at one model, as far back as `MAX_POINTS` looks."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import msgspec

from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.family_sums import SummedTotals
from quire.metrics.live_totals import LiveTotals
from quire.server.debug.state import Series

MAX_POINTS = 600
COLUMNS = Series.__struct_fields__


class SeriesLog:
    """Points of one model.

    Args:
        metrics: where it is counted: an `EngineMetrics`, or sums of several front ends.
        clock: Unix seconds.
    """

    def __init__(self, metrics: EngineMetrics | SummedTotals, clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self._clock = clock
        self._before: tuple[float, LiveTotals] | None = None
        self._series = Series()

    def look(self) -> None:
        """Add a point for what happened since the last look; the first look has none."""
        now, totals = self._clock(), self.metrics.totals()
        before, self._before = self._before, (now, totals)
        if before is None or now <= before[0]:
            return
        seconds, new = now - before[0], totals.since(before[1])
        stats = self.metrics.last_stats
        point = (
            now, new.generated / seconds, new.computed / seconds, new.num_ended / seconds,
            stats.num_running, stats.num_waiting, stats.kv_cache_usage,
            new.ttft.quantile(0.5), new.ttft.quantile(0.95), new.itl.mean, new.itl.quantile(0.95),
            _share(new.prefix_hits, new.prefix_queries), _share(new.accepted, new.drafted), new.num_preemptions,
            _share(new.flops, new.possible_flops), _share(new.moved_bytes, new.possible_bytes),
        )  # fmt: skip
        for name, value in zip(COLUMNS, point, strict=True):
            column = getattr(self._series, name)
            column.append(value)
            if len(column) > MAX_POINTS:
                del column[0]

    def since(self, time: float) -> Series:
        """The points after a time."""
        first = bisect.bisect_right(self._series.time, time)
        return msgspec.convert({name: getattr(self._series, name)[first:] for name in COLUMNS}, Series)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
