"""What one tenant of a server may do. Read from the key file by `server.http.keys`; values only."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of a tenant; what is left out has none."""

    requests_per_minute: int | None = setting(
        None, "Requests a minute, refilled evenly; so many may come at once.", minimum=1, maximum=10**9
    )
    tokens_per_minute: int | None = setting(
        None,
        "Tokens a minute, refilled evenly: a prompt is charged when it is admitted, new tokens as they come. Answers "
        "under way are never cut; what they take too much is paid off before the next request.",
        minimum=1,
        maximum=10**12,
    )
    max_concurrent: int | None = setting(None, "Requests under way at once.", minimum=1)
    max_tokens: int | None = setting(
        None, "Most that `max_tokens` of a request may be; also its value when a request leaves it open.", minimum=1
    )
    queue_share: float | None = setting(
        None, "Share of max_num_queued_reqs and max_num_queued_tokens that may be this tenant's.", minimum=0, maximum=1
    )
    priority: int = setting(0, "Priority of requests that name none; lower goes first.")
    min_priority: int | None = setting(None, "Lowest number, so the most urgent, that a request may name.")
    max_priority: int | None = setting(None, "Highest number that a request may name.")
    weight: float | None = setting(
        None,
        "Share of the engine under scheduling_policy=fair, relative to the weights of others that have requests; "
        "1 when left out.",
        minimum=0.001,
        maximum=1e6,
    )
    policy: str = setting(
        "fcfs",
        "Order of the tenant's own requests under scheduling_policy=fair.",
        choices=("fcfs", "priority", "shortest"),
    )
    operator: bool | None = setting(
        None, "May read /metrics, and /load of the whole server; when left out: only the tenant named default may."
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
