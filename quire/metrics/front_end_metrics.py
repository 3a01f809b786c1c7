"""Metrics of several front-end processes of one server. Made by their owner; own nothing."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class FrontEndMetrics:
    """Series without labels.

    Args:
        count: how many there should be.
        num_ready: how many take connections now.
    """

    def __init__(self, registry: CollectorRegistry, count: int, num_ready: Callable[[], int]) -> None:
        Gauge("quire:front_ends", "Front-end processes that should run.", registry=registry).set(count)
        ready = Gauge("quire:front_ends_ready", "Front-end processes that take connections.", registry=registry)
        ready.set_function(num_ready)
        self._restarts = Counter(
            "quire:front_end_restarts", "Front-end processes that were replaced.", registry=registry
        )

    def note_restart(self) -> None:
        """One has ended and gets a successor."""
        self._restarts.inc()
