"""Series that routers and gateways for vLLM read beside today's names: older names, and which adapters are loaded.

Registered by `EngineMetrics`; computed when the page is read, by the production stack's router (older names), or by
the endpoint picker of the Gateway API inference extension and llm-d (`lora_requests_info`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

LORA_LABELS = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


class GatewayMetrics:
    """A collector.

    Args:
        labels: of every series.
        cache_usage: fraction of blocks in use.
        num_queries, num_hits: prompt tokens looked up in the prefix cache, and found.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        cache_usage: Callable[[], float],
        num_queries: Callable[[], float],
        num_hits: Callable[[], float],
    ) -> None:
        self._labels = dict(labels)
        self._cache_usage = cache_usage
        self._num_queries, self._num_hits = num_queries, num_hits

    def collect(self) -> Iterator[Metric]:
        """The series of now."""
        queries, hits = self._num_queries(), self._num_hits()
        yield self._gauge("gpu_cache_usage_perc", "kv_cache_usage_perc by its older name.", self._cache_usage())
        for name, value in (("queries", queries), ("hits", hits)):
            family = CounterMetricFamily(
                f"vllm:gpu_prefix_cache_{name}", f"prefix_cache_{name} by its older name.", labels=list(self._labels)
            )
            family.add_metric(list(self._labels.values()), value)
            yield family
        rate = hits / queries if queries else 0.0
        yield self._gauge("gpu_prefix_cache_hit_rate", "Prompt tokens found of those looked up, 0 to 1.", rate)
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info", "LoRA adapters, of which there are none; the value is the Unix time.",
            labels=list(LORA_LABELS),
        )  # fmt: skip
        adapters.add_metric(list(LORA_LABELS.values()), time.time())
        yield adapters

    def _gauge(self, name: str, doc: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
