"""Why the beginning of a prompt was not in the prefix cache. Values only.

Made by the KV cache manager at admission, carried by `RequestEvent`, shown in outputs and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import msgspec


class MissReason(IntEnum):
    """Why the hit ended before the last block that could have been used; `str()` is the name users see."""

    COLD = 1  # no block like this is known
    EVICTED = 2  # it was cached, and its block was needed
    DIFFERENT_TOKEN = 3  # a block that follows the same prefix differs from `position` on
    TEMPLATE_CHANGED = 4  # the same, and that block's prompt was made by another chat template
    OTHER_SALT = 5  # the same tokens are cached under another cache_salt
    OTHER_TENANT = 6  # the same tokens are cached for another tenant
    ADAPTER = 7  # the same tokens are cached for another adapter
    BELOW_ONE_PAGE = 8  # the prompt has no full block that leaves a token to compute
    LAST_TOKEN = 9  # all is cached, but one token must be computed, and with it its block
    CACHING_OFF = 10  # enable_prefix_caching is off
    READING_SKIPPED = 11  # the request asked for it
    PROMPT_LOGPROBS = 12  # every position of the prompt must be computed
    NO_STORE = 13  # who computed the block before asked for it not to be kept
    STILL_COMPUTING = 14  # a running request is about to fill the block
    CACHE_RESET = 15  # it was cached before the cache was reset
    PREEMPTED = 16  # the request lost its blocks to others and computes them again
    NO_CHECKPOINT = 17  # the tokens up to `position` are cached, but no recurrent state was kept there
    LOAD_FAILED = 18  # it was in a tier behind the cache, and could not be loaded, or not in time
    SLOWER_TO_LOAD = 19  # it is in a tier, and to compute it takes less time
    BEING_STORED = 20  # it is on its way to a tier
    NOT_IN_TIER = 21  # it was cached, and no tier has it
    OTHER_DIGEST = 22  # the disk has it for other weights, settings or build
    TIER_DOWN = 23  # the disk does not answer

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why and where a hit ended.

    Attributes:
        reason: as far as it follows from blocks of the request's own salt and tenant.
        position: first token of the request that differs from what is cached, or that was not found; where a recurrent
            state was not kept or is evicted: the tokens at whose end it would have helped.
        operator_reason: what is also known, from blocks that the request may not learn of; None = nothing.
    """

    reason: MissReason
    position: int
    operator_reason: MissReason | None = None

    @property
    def full_reason(self) -> MissReason:
        """The reason that says most, for operators alone."""
        return self.reason if self.operator_reason is None else self.operator_reason


class PrefixCacheInfo(msgspec.Struct, frozen=True):
    """What the prefix cache did for a request.

    Attributes:
        cached_tokens: prompt tokens that were found.
        miss: why there were not more; None when all that can be used was found.
    """

    cached_tokens: int
    miss: CacheMiss | None = None

    @property
    def reason(self) -> str | None:
        """Why no more was found, blocks of other salts and tenants considered; None = nothing was missed."""
        return None if self.miss is None else str(self.miss.full_reason)

    @property
    def position(self) -> int | None:
        """First token that differs from what is cached, or that was not found; None = nothing was missed."""
        if self.miss is None:
            return None
        return self.miss.position if self.miss.operator_reason is None else self.cached_tokens
