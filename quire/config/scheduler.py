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
        None, "Most tokens computed in one step; default by device.", minimum=1, maximum=2**24, is_size=True
    )
    max_num_seqs: int | None = setting(
        None, "Most requests running at once; default by device.", minimum=1, maximum=65536
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Order of requests: fcfs = by arrival; priority = the lowest `priority` first, which also takes the place of "
        "running requests of higher ones; fair = tenants share by weight, the one served least first, and none slows "
        "down another's steps beyond max_decode_slowdown (of one tenant the same as fcfs); shortest = the least "
        "expected work first, which also takes the place of running requests with far more left, aged so that "
        "nothing starves. A server with an api_key_file has fair by default.",
        choices=OWN_POLICIES,
        plugins=SCHEDULING_POLICY,
    )
    scheduler_cls: str | None = setting(
        None, "Name of a plugin that takes the place of the whole scheduler; default: Quire's own."
    )
    enable_chunked_prefill: bool = setting(True, "Compute a long prompt in parts beside other requests' decode steps.")
    long_prefill_token_threshold: int = setting(
        0, "Most prompt tokens of one request per step while others run, in tokens; 0 = no limit.", minimum=0
    )
    max_decode_slowdown: float | None = setting(
        None,
        "A step with prompts beside decoding requests may take so many times as long as one in which every request "
        "that is there decodes; longer prompts are cut smaller. At least 1, or 0 = no limit; default: 2 for a server, "
        "0 offline.",
        minimum=0.0,
    )
    max_inter_token_latency_ms: float = setting(
        0.0,
        "A step with prompts beside decoding requests may take so many milliseconds; longer prompts are cut smaller, "
        "beside max_decode_slowdown. Where decoding alone takes longer, prompts advance by 8 tokens a step. 0 = none.",
        minimum=0.0,
    )
    queue_timeout: float = setting(
        0.0,
        "A request that has waited so many seconds without ever running ends with an error, unless it names a time of "
        "its own; 0 = it waits.",
        minimum=0.0,
        maximum=1e9,
    )
    reserve_full_prompt: bool = setting(
        True, "Admit a request only when pages for its whole prompt are free.", flag="scheduler_reserve_full_isl"
    )

    preemption_mode: str = setting(
        "auto",
        "What becomes of a request that must make room: recompute = its tokens are computed again; swap = its pages go "
        "to the swap space while that has room; auto = for each the one that costs less by what was measured. "
        "Without swap_space all are recomputed.",
        choices=("auto", "recompute", "swap"),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_decode_slowdown is not None and 0 < self.max_decode_slowdown < 1:
            raise ConfigError(
                f"max_decode_slowdown={self.max_decode_slowdown} asks for steps that are faster with more to compute",
                hint="use a number of at least 1 (2 = twice as long), or 0 for no limit",
                field="max_decode_slowdown",
            )

    @property
    def has_plugin(self) -> bool:
        """Whether the scheduler or its policy is another package's."""
        return self.scheduler_cls is not None or self.scheduling_policy not in OWN_POLICIES
