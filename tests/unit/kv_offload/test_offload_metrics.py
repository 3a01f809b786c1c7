"""Every kind of fault has a series from the start, and what is counted in steps is added up."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from quire.core.stats import OffloadStats
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.faults import FaultKind
from quire.metrics.offload_metrics import FAULTS, OffloadMetrics


def test_metrics_have_all_kinds_of_faults_and_add_up_what_steps_report():
    assert set(FAULTS) == {kind.value for kind in FaultKind}
    registry, counts = CollectorRegistry(), OffloadCounts()
    metrics = OffloadMetrics(registry)
    assert counts.take() is None
    for _ in range(2):
        counts.add(num_loaded=3, loaded_bytes=300, load_s=0.5, num_evicted=1)
        counts.add_fault(FaultKind.HUNG)
        taken = counts.take()
        assert taken == OffloadStats(num_loaded=3, loaded_bytes=300, load_s=0.5, num_evicted=1, faults={"hung": 1})
        metrics.record(taken)
    assert counts.take() is None and counts.totals().num_loaded == 6
    assert registry.get_sample_value("quire:kv_offload_loaded_blocks_total") == 6
    assert registry.get_sample_value("quire:kv_offload_load_seconds_total") == 1.0
    assert registry.get_sample_value("quire:kv_offload_faults_total", {"kind": "hung"}) == 2
    assert registry.get_sample_value("quire:kv_offload_faults_total", {"kind": "no_space"}) == 0
    assert registry.get_sample_value("quire:kv_offload_evicted_blocks_total", {"medium": "disk"}) == 2
