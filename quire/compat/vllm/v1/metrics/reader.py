"""vLLM's `v1.metrics.reader`: what `LLM.get_metrics` returns."""

from __future__ import annotations

from quire.metrics.records import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
