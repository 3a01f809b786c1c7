"""How much work one step may hold, and who goes first."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.errors import ConfigError
from quire.plugins import SCHEDULING_POLICY

OWN_POLICIES = ("fcfs", "priority", "fair", "shortest")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of the scheduler."""

    max_num_batched_tokens: int | None = setting(
        None,
        "Maximum number of tokens computed in one step; default by device.",
        minimum=1,
        maximum=2**24,
        is_size=True,
    )
    max_num_seqs: int | None = setting(
        None, "Maximum number of requests running at once; default by device.", minimum=1, maximum=65536
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Order of requests: fcfs = by arrival; priority = the lowest `priority` value first, preempting "
        "running requests of higher values; fair = tenants share by weight, the least served first, and "
        "no tenant slows down the steps of another beyond max_decode_slowdown (with one tenant the same "
        "as fcfs); shortest = the least expected work first, preempting running requests with far more "
        "left, with aging against starvation. Default with an api_key_file: fair.",
        choices=OWN_POLICIES,
        plugins=SCHEDULING_POLICY,
    )
    scheduler_cls: str | None = setting(None, "Name of a plugin that replaces the scheduler; default: Quire's own.")
    enable_chunked_prefill: bool = setting(
        True, "Compute long prompts in chunks, in the same steps as other requests' decodes."
    )
    long_prefill_token_threshold: int = setting(
        0,
        "Maximum prompt tokens of one request per step while others run; 0 = no limit.",
        minimum=0,
        needs=("enable_chunked_prefill",),
    )
    max_decode_slowdown: float | None = setting(
        None,
        "Maximum slowdown of decode steps by prefill: a mixed step may take this many times as long as a "
        "decode-only step of the same requests (2 = twice as long); prefill chunks are made smaller to "
        "fit. At least 1, or 0 = no limit; default: 2 for a server, 0 offline.",
        minimum=0.0,
    )
    max_inter_token_latency_ms: float = setting(
        0.0,
        "Maximum duration of a step with both prefill and decodes, in milliseconds; prefill chunks are "
        "made smaller to fit, in addition to max_decode_slowdown. If decoding alone takes longer, "
        "prefill advances 8 tokens per step. 0 = no limit.",
        minimum=0.0,
        needs=("enable_chunked_prefill",),
    )
    queue_timeout: float = setting(
        0.0,
        "A request that has waited this many seconds without ever running fails with an error; a request "
        "may set its own. 0 = no timeout.",
        minimum=0.0,
        maximum=1e9,
    )
    reserve_full_prompt: bool = setting(
        True, "Admit a request only when there are free blocks for its whole prompt.", flag="scheduler_reserve_full_isl"
    )

    preemption_mode: str = setting(
        "auto",
        "How a preempted request is resumed: recompute = its tokens are computed again; swap = its "
        "blocks are copied to the swap space while there is room; auto = whichever is cheaper by "
        "measured costs. Without swap_space it is always recompute.",
        choices=("auto", "recompute", "swap"),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_decode_slowdown is not None and 0 < self.max_decode_slowdown < 1:
            raise ConfigError(
                f"max_decode_slowdown={self.max_decode_slowdown} is below 1: prefill cannot make steps faster",
                hint="use a number of at least 1 (2 = twice as long), or 0 for no limit",
                field="max_decode_slowdown",
            )

    @property
    def has_plugin(self) -> bool:
        """Whether the scheduler or its policy is another package's."""
        return self.scheduler_cls is not None or self.scheduling_policy not in OWN_POLICIES
