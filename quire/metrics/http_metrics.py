"""HttpMetrics: requests by path and status, under the names that dashboards for vLLM read.

Told by the server's outermost middleware. Owns its two series.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

DURATIONS_S = (0.1, 0.5, 1.0)
NO_ROUTE = "none"
UNCOUNTED = frozenset((
    "/metrics", "/health", "/live", "/ready", "/load", "/ping", "/version", "/server_info", "/debug/state",
))  # fmt: skip


class HttpMetrics:
    """Counts HTTP requests.

    Args:
        registry: gets the series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests by path, method and status class.", ["method", "status", "handler"],
            registry=registry,
        )  # fmt: skip
        self._durations = Histogram(
            "http_request_duration_seconds", "Duration of HTTP requests in seconds.", ["method", "handler"],
            buckets=DURATIONS_S, registry=registry,
        )  # fmt: skip

    def record(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """A request has ended.

        Args:
            route: path of the route that answered it, with its parameters' names; None = there was none.
            status: 0 = nothing was answered.
        """
        if route in UNCOUNTED:
            return
        handler = route or NO_ROUTE
        self._requests.labels(method, f"{status // 100}xx" if status else "none", handler).inc()
        self._durations.labels(method, handler).observe(seconds)
