"""ModelMetrics: which models of a server are in memory, how long they took to load, who waits.

Fed by the server's pool. Owns its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.utils.phases import Phases

SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class ModelMetrics:
    """Series of a server with several models."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        label = ["model_name"]
        self._state = Gauge("quire:model_state", "1 for the state of a model.", [*label, "state"], registry=registry)
        self._memory = Gauge("quire:model_memory_bytes", "Memory that a model takes now.", label, registry=registry)
        self._waiting = Gauge(
            "quire:model_requests_waiting", "Requests that wait for a model.", label, registry=registry
        )
        self._predicted = Gauge(
            "quire:model_predicted_wait_seconds", "Predicted seconds until a model is ready.", label, registry=registry
        )
        self._budget = Gauge("quire:models_memory_budget_bytes", "memory_budget in bytes.", registry=registry)
        self._loads = Counter(
            "quire:model_loads", "Loads of a model, by outcome (ready, failed).", [*label, "outcome"], registry=registry
        )
        self._unloads = Counter("quire:model_unloads", "Unloads of a model.", label, registry=registry)
        self._load_s = Histogram(
            "quire:model_load_seconds", "Duration of loads in seconds.", label, buckets=SECONDS, registry=registry
        )
        self._wait_s = Histogram(
            "quire:model_wait_seconds", "Seconds that requests waited for a model that was not ready.", label,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._start = Gauge(
            "quire:startup_seconds", "Startup time by phase in seconds.", ["process", "phase"], registry=registry
        )

    def show_budget(self, num_bytes: int) -> None:
        """The memory that the models may take together."""
        self._budget.set(num_bytes)

    def show_start(self, phases: Phases) -> None:
        """What the start of the server's process took."""
        for name, seconds in phases:
            self._start.labels(process="server", phase=name).set(seconds)

    def show_model(
        self,
        model: str,
        states: Sequence[str],
        *,
        state: Callable[[], str],
        memory_bytes: Callable[[], float],
        num_waiting: Callable[[], float],
        predicted_wait_s: Callable[[], float],
    ) -> None:
        """Show a model, by functions that are called when the page is made."""
        for one in states:
            self._state.labels(model, one).set_function(partial(_is_in, state, one))
        self._memory.labels(model).set_function(memory_bytes)
        self._waiting.labels(model).set_function(num_waiting)
        self._predicted.labels(model).set_function(predicted_wait_s)
        for outcome in ("ready", "failed"):
            self._loads.labels(model, outcome)
        self._unloads.labels(model)
        self._load_s.labels(model)
        self._wait_s.labels(model)

    def record_load(self, model: str, seconds: float) -> None:
        """A model is ready."""
        self._loads.labels(model, "ready").inc()
        self._load_s.labels(model).observe(seconds)

    def record_failure(self, model: str) -> None:
        """A load failed."""
        self._loads.labels(model, "failed").inc()

    def record_unload(self, model: str) -> None:
        """A model's memory is free."""
        self._unloads.labels(model).inc()

    def record_wait(self, model: str, seconds: float) -> None:
        """A request got the model it had waited for."""
        self._wait_s.labels(model).observe(seconds)


def _is_in(state: Callable[[], str], one: str) -> float:
    return float(state() == one)
