"""What one tenant of a server may do. Read from the key file by `server.http.keys`; values only."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of a tenant; what is left out has none."""

    requests_per_minute: int | None = setting(
        None, "Requests per minute (token bucket; the burst is the same number).", minimum=1, maximum=10**9
    )
    tokens_per_minute: int | None = setting(
        None,
        "Tokens per minute (token bucket): prompts are charged on admission, new tokens as they are "
        "generated. Running requests are never cut off; overuse is deducted before the next request is "
        "admitted.",
        minimum=1,
        maximum=10**12,
    )
    max_concurrent: int | None = setting(None, "Maximum number of concurrent requests.", minimum=1)
    max_tokens: int | None = setting(None, "Maximum `max_tokens` of a request, and its default.", minimum=1)
    queue_share: float | None = setting(
        None,
        "Fraction of max_num_queued_reqs and max_num_queued_tokens that this tenant may use.",
        minimum=0,
        maximum=1,
    )
    priority: int = setting(0, "Default priority of requests; lower values run first.")
    min_priority: int | None = setting(None, "Lowest (most urgent) priority that a request may set.")
    max_priority: int | None = setting(None, "Highest priority value that a request may set.")
    weight: float | None = setting(
        None,
        "Weight under scheduling_policy=fair, relative to other tenants with requests; default: 1.",
        minimum=0.001,
        maximum=1e6,
    )
    policy: str = setting(
        "fcfs",
        "Order of the tenant's own requests under scheduling_policy=fair.",
        choices=("fcfs", "priority", "shortest"),
    )
    operator: bool | None = setting(
        None, "Operator: may read /metrics and the server-wide /load; default: only the tenant named default."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        low = self.priority if self.min_priority is None else self.min_priority
        high = self.priority if self.max_priority is None else self.max_priority
        if not low <= self.priority <= high:
            raise ConfigError(
                f"priority={self.priority} is not between min_priority={low} and max_priority={high}",
                hint="widen the range, or choose a priority inside it",
                field="priority",
            )
