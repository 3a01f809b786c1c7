"""OffloadMetrics: what a tier behind the KV cache has done, for Prometheus. Made by `EngineMetrics` if there is one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from quire.core.stats import OffloadStats

COUNTERS = {
    "num_loaded": ("kv_offload_loaded_blocks", "Blocks loaded into the KV cache from host memory or disk."),
    "num_stored": ("kv_offload_stored_blocks", "Blocks written to the disk."),
    "loaded_bytes": ("kv_offload_load_bytes", "Bytes of the loaded blocks."),
    "stored_bytes": ("kv_offload_store_bytes", "Bytes of the blocks written to the disk."),
    "load_s": ("kv_offload_load_seconds", "Seconds from the begin of each load to its end."),
    "store_s": ("kv_offload_store_seconds", "Seconds from the begin of each store until its blocks were free."),
    "num_dropped": ("kv_offload_dropped_blocks", "Blocks not stored: too many were waiting, or the disk was unusable."),
    "num_prefetched": ("kv_offload_prefetched_blocks", "Blocks read from disk before a request needed them."),
    "num_kept_out": ("kv_offload_loads_skipped", "Loads left out because computing the blocks takes less time."),
}
"""Field of `OffloadStats` -> name after the prefix, and meaning."""

FAULTS = (
    "not_a_block", "other_version", "other_block", "wrong_size", "wrong_checksum", "wrong_tag", "missing", "no_space",
    "read_only", "io_error", "hung", "slow",
)  # fmt: skip


class OffloadMetrics:
    """Counters of one engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(f"quire:{metric}", doc, registry=registry) for name, (metric, doc) in COUNTERS.items()
        }
        self._evicted = Counter(
            "quire:kv_offload_evicted_blocks", "Blocks evicted from host memory or disk.", ["medium"], registry=registry
        )
        self._faults = Counter(
            "quire:kv_offload_faults", "Blocks that could not be loaded or stored, by kind of fault.", ["kind"],
            registry=registry,
        )  # fmt: skip
        for medium in ("disk", "host"):
            self._evicted.labels(medium=medium)
        for kind in FAULTS:
            self._faults.labels(kind=kind)

    def record(self, stats: OffloadStats) -> None:
        """Add what was done."""
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name))
        self._evicted.labels(medium="disk").inc(stats.num_evicted)
        self._evicted.labels(medium="host").inc(stats.num_evicted_from_host)
        for kind, count in stats.faults.items():
            self._faults.labels(kind=kind).inc(count)
