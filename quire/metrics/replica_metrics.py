"""ReplicaMetrics: the metrics of an engine with several replicas, each under its number as the label `engine`.

Made by a server in place of `EngineMetrics`, which is that of replica 0 here. Replicas appear when their first step
comes; those that were removed keep what they counted.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.sampling_params import SamplingParams
from quire.core.stats import RequestStateStats
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.server_metrics import Merged, ServerMetrics


def replicas_gauge(registry: CollectorRegistry) -> Gauge:
    """The series of an engine with several replicas."""
    return Gauge("quire:replicas_ready", "Replicas whose engine core runs.", registry=registry)


class ReplicaMetrics(EngineMetrics):
    """As `EngineMetrics`."""

    def __init__(self, config: QuireConfig, model_name: str, server: ServerMetrics | None = None) -> None:
        super().__init__(config, model_name, server)
        self._config, self._model_name = config, model_name
        self._others: dict[int, EngineMetrics] = {}
        self._ready = replicas_gauge(self.registry)
        for index in range(1, config.parallel.data_parallel_size):
            self._of(index)

    def count_replicas(self, num_ready: Callable[[], int]) -> None:
        """Show how many replicas can be given requests."""
        self._ready.set_function(num_ready)

    def record_step(self, step: EngineCoreOutputs) -> None:
        """As `EngineMetrics`."""
        if step.engine_index:
            self._of(step.engine_index).record_step(step)
        else:
            super().record_step(step)

    def record_request(
        self,
        stats: RequestStateStats,
        params: SamplingParams,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        max_answer_tokens: int,
    ) -> None:
        """As `EngineMetrics`."""
        record = self._of(stats.engine_index).record_request if stats.engine_index else super().record_request
        record(stats, params, num_prompt_tokens, num_cached_tokens, max_answer_tokens)

    def record_finish(self, reason: str, engine_index: int = 0) -> None:
        """As `EngineMetrics`."""
        if engine_index:
            self._of(engine_index).record_finish(reason)
        else:
            super().record_finish(reason)

    def note_unloaded(self) -> None:
        """As `EngineMetrics`."""
        super().note_unloaded()
        for one in self._others.values():
            one.note_unloaded()

    def all_series(self) -> Merged:
        """As `EngineMetrics`; series without the label `engine` get it."""
        registries = [self.registry, *(one.registry for one in self._others.values())]
        labels = [{"engine": str(index)} for index in (0, *self._others)]
        return Merged([self.server.registry, *registries], [{}, *labels])

    def _of(self, index: int) -> EngineMetrics:
        metrics = self._others.get(index)
        if metrics is None:
            metrics = self._others[index] = EngineMetrics(self._config, self._model_name, self.server, index)
        return metrics
