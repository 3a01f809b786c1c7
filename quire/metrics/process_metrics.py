"""ProcessMetrics: what the processes of engine cores take, for Prometheus. Made by `EngineMetrics`; owns nothing.

The server's own process is shown under Prometheus' standard names, `process_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.core.memory_parts import MemoryPart
from quire.core.process_stats import CoreProcesses, RankUsage

GAUGES: dict[str, tuple[str, Callable[[RankUsage], float]]] = {
    "resident_memory_bytes": (
        "Resident memory of engine cores' processes, ranks on this machine.", lambda one: one.rss_bytes,
    ),
    "proportional_memory_bytes": (
        "The same with pages that several processes have divided among them (PSS); read every 15 s at most.",
        lambda one: one.pss_bytes,
    ),
    "swapped_memory_bytes": ("Memory of these processes in the machine's swap.", lambda one: one.swapped_bytes),
    "silence_seconds": (
        "Seconds since something came from the ranks of other machines, the longest of them; streams wait. Of rank 0.",
        lambda one: one.silence_s,
    ),
    "threads": ("Threads of these processes.", lambda one: one.num_threads),
    "open_fds": ("Open files of these processes.", lambda one: one.num_fds),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, str, dict[str, Callable[[RankUsage], float]]]] = {
    "cpu_seconds": (
        "CPU seconds of these processes.", "mode", {"user": lambda one: one.user_s, "system": lambda one: one.system_s},
    ),
    "page_faults": (
        "Page faults of these processes; major ones read from a disk.", "kind",
        {"minor": lambda one: one.minor_faults, "major": lambda one: one.major_faults},
    ),
}  # fmt: skip
_HUGE: dict[str, Callable[[RankUsage], int]] = {
    "asked": lambda one: one.memory.get(MemoryPart.HUGE_PAGES_ASKED.label, 0),
    "obtained": lambda one: one.huge_bytes,
}


EXAMPLE_USAGE = RankUsage(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, {MemoryPart.WEIGHTS.label: 0})
EXAMPLE_CORE = CoreProcesses(0, [])
"""For the reference of metrics."""


class ProcessMetrics(Collector):
    """Reads usages when it is looked at.

    Args:
        model_name: label of every series.
        usages: of the processes of now.
        cores: those that should run.
    """

    def __init__(
        self,
        model_name: str,
        usages: Callable[[], Sequence[RankUsage]],
        cores: Callable[[], Sequence[CoreProcesses]] = tuple,
    ) -> None:
        self._model_name = model_name
        self._usages = usages
        self._cores = cores

    def collect(self) -> Iterable[Metric]:
        """All families."""
        usages, labels = list(self._usages()), ["model_name", "engine", "rank"]
        yield from self._of_cores({one.engine for one in usages if not one.rank})
        for name, (doc, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"quire:core_{name}", doc, labels=labels)
            for one in usages:
                gauge.add_metric(self._of(one), read(one))
            yield gauge
        for name, (doc, label, reads) in COUNTERS.items():
            counter = CounterMetricFamily(f"quire:core_{name}", doc, labels=[*labels, label])
            for one in usages:
                for value, count in reads.items():
                    counter.add_metric([*self._of(one), value], count(one))
            yield counter
        doc = "Memory for which huge pages were asked for (asked, of rank 0), and that is in huge pages (obtained)."
        huge = GaugeMetricFamily("quire:core_huge_page_bytes", doc, labels=[*labels, "kind"])
        doc = (
            "Memory of rank 0 by what it is for: weights (as the checkpoint has them), packed_weights, kv_cache and "
            "swap_space (whole, used or not), host_tier, captures, drafts, grammars; other = resident beyond these."
        )
        parts = GaugeMetricFamily("quire:core_memory_bytes", doc, labels=[*labels, "part"])
        for one in usages:
            for kind, size in _HUGE.items():
                huge.add_metric([*self._of(one), kind], size(one))
            for part, num_bytes in memory_parts(one).items():
                parts.add_metric([*self._of(one), part], num_bytes)
        yield huge
        yield parts

    def _of_cores(self, running: set[int]) -> Iterable[Metric]:
        labels = ["model_name", "engine"]
        up = GaugeMetricFamily("quire:core_up", "1 = the engine core's process runs.", labels=labels)
        reports = CounterMetricFamily("quire:crash_reports", "Reports of crashes of this core.", labels=labels)
        for core in self._cores():
            of_core = [self._model_name, str(core.engine_index)]
            up.add_metric(of_core, core.engine_index in running)
            reports.add_metric(of_core, core.num_reports)
        yield up
        yield reports

    def _of(self, one: RankUsage) -> list[str]:
        return [self._model_name, str(one.engine), str(one.rank)]


def memory_parts(usage: RankUsage) -> dict[str, int]:
    """Bytes by part, and `other`: the least of resident memory that no part accounts for; empty = not known."""
    parts = {name: size for name, size in usage.memory.items() if name != MemoryPart.HUGE_PAGES_ASKED.label}
    return {**parts, "other": max(0, usage.rss_bytes - sum(parts.values()))} if parts else {}
