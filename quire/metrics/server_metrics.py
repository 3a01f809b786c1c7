"""ServerMetrics: what a server counts whatever models it has: its process, HTTP requests, refusals.

Made by a server, or by the metrics of an engine that has none. Owns its registry; `merged` makes one page of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from quire.metrics.http_metrics import HttpMetrics

QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
REFUSALS = (
    *QUEUE_LIMITS, "queue_share", "requests_per_minute", "tokens_per_minute", "max_concurrent", "max_tokens",
    "priority", "bad_request", "unauthorized", "forbidden", "not_found", "method_not_allowed", "body_timeout",
    "body_too_large", "head_too_large", "draining", "paused", "engine_dead", "queue_timeout",
    "model_load_failed",
)  # fmt: skip


MAX_SHOWN_TENANTS = 200
OTHER_TENANTS = "(others)"
TENANT_COUNTERS = {
    "requests": "Requests that have ended, each prompt counted; tenants beyond 200 are (others).",
    "prompt_tokens": "Prompt tokens of these requests; of one that was left, if a token had come of it.",
    "cached_tokens": "Of these, tokens found in the prefix cache.",
    "generated_tokens": "Generated tokens of these requests.",
}


class ServerMetrics:
    """Series without a model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        self._refusals = Counter(
            "quire:requests_refused", "Requests rejected, by reason and tenant.",
            ["reason", "tenant"], registry=self.registry,
        )  # fmt: skip
        for reason in REFUSALS:
            self._refusals.labels(reason=reason, tenant="")
        self._tenant_counters = {
            name: Counter(f"quire:tenant_{name}", doc, ["tenant"], registry=self.registry)
            for name, doc in TENANT_COUNTERS.items()
        }
        self._shown_tenants: set[str] = set()
        self._dropped_traces = Counter(
            "quire:traces_dropped", "Request traces that the collector did not accept.", registry=self.registry
        )

    def record_refusal(self, reason: str, tenant: str) -> None:
        """A request was refused.

        Args:
            reason: one of `REFUSALS`.
            tenant: whose it was, by the name in the key file; "" = unknown.
        """
        self._refusals.labels(reason=reason, tenant=tenant).inc()

    def record_tenant(
        self, tenant: str, requests: int, prompt_tokens: int, cached_tokens: int, generated_tokens: int
    ) -> None:
        """Requests of a tenant have ended; the first `MAX_SHOWN_TENANTS` have series of their own."""
        if tenant not in self._shown_tenants:
            if len(self._shown_tenants) < MAX_SHOWN_TENANTS:
                self._shown_tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        counts = (requests, prompt_tokens, cached_tokens, generated_tokens)
        for counter, count in zip(self._tenant_counters.values(), counts, strict=True):
            counter.labels(tenant=tenant).inc(count)

    def record_dropped_traces(self, count: int) -> None:
        """Traces of `count` requests were not sent; may be called by any thread."""
        self._dropped_traces.inc(count)


class Merged(Collector):
    """Several registries as one: families of one name become one family.

    Args:
        registries: in the order of the page.
        labels: for the samples of each registry that do not have them; empty = none.
    """

    def __init__(self, registries: Sequence[Collector], labels: Sequence[Mapping[str, str]] = ()) -> None:
        self._registries = registries
        self._labels = labels or [{}] * len(registries)

    def collect(self) -> Iterable[Metric]:
        """All families."""
        families: dict[str, Metric] = {}
        for registry, labels in zip(self._registries, self._labels, strict=True):
            for family in registry.collect():
                known = families.get(family.name)
                if known is None:
                    known = families[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
                known.samples += [one._replace(labels={**labels, **one.labels}) for one in family.samples]
        return families.values()


def page(collector: Collector) -> bytes:
    """The series of `collector`, in Prometheus' text format."""
    return generate_latest(collector)
