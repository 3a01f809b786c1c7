"""The scheduler's limits as numbers, checked against each other.

Made once by the scheduler from its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import KVCacheConfig
from quire.errors import ConfigError
from quire.kv_cache.block_demand import PoolCounts
from quire.scheduler.budget import TokenCap, cap_long_prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may run.

    Attributes:
        max_num_seqs: requests at once.
        max_num_batched_tokens: tokens in one step.
        max_model_len: tokens of one request, prompt and output.
        max_decode_slowdown: most times its duration that a decode step may take with prompt tokens; None = no bound.
        max_step_s: most seconds that a decode step may take with prompt tokens; None = no bound.
        caps: bounds on the tokens of one request in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_decode_slowdown: float | None
    max_step_s: float | None
    caps: tuple[TokenCap, ...]


def make_limits(config: SchedulerConfig, max_model_len: int) -> Limits:
    """The limits of a resolved configuration.

    Raises:
        ConfigError: a limit is missing, or the limits contradict each other.
    """
    if config.max_num_seqs is None or config.max_num_batched_tokens is None:
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs}, max_num_batched_tokens={config.max_num_batched_tokens}: "
            "the scheduler needs integers",
            hint="resolve the configuration first",
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt of max_model_len={max_model_len} tokens must fit in one step of "
            f"max_num_batched_tokens={config.max_num_batched_tokens}",
            hint="enable chunked prefill, raise max_num_batched_tokens, or lower max_model_len",
            field="max_num_batched_tokens",
        )
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        # A prompt that cannot be cut cannot be slowed down either.
        max_decode_slowdown=(config.max_decode_slowdown or None) if config.enable_chunked_prefill else None,
        max_step_s=config.max_inter_token_latency_ms / 1e3 or None if config.enable_chunked_prefill else None,
        caps=_make_caps(config),
    )


def watermark_counts(cache: CacheConfig, kv_cache: KVCacheConfig) -> PoolCounts:
    """Blocks left free when a request joins others, pool for pool: of those that grow with requests."""
    return tuple(
        int(cache.watermark * size.num_blocks) if any(g.spec.can_take_back for g in kv_cache.groups_of(pool)) else 0
        for pool, size in enumerate(kv_cache.pool_sizes())
    )


def _make_caps(config: SchedulerConfig) -> tuple[TokenCap, ...]:
    if config.enable_chunked_prefill and config.long_prefill_token_threshold > 0:
        return (cap_long_prefill(config.long_prefill_token_threshold),)
    return ()
