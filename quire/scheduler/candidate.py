"""Candidate: a request without a row as it would be admitted to a step. A value, made by admission for one check."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Request
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.swap_pool import SwappedBlocks
from quire.scheduler.kv_tier import ExternalHit


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is cached of a request, what a tier has beyond that, and how many tokens the request would compute."""

    request: Request
    prefix: CachedPrefix
    num_new_tokens: int
    external: ExternalHit | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values it would begin with."""
        return self.prefix.num_tokens if self.external is None else self.external.num_tokens

    @property
    def swapped(self) -> SwappedBlocks | None:
        """Its blocks in the swap space, where these hold more of it than the cache."""
        return None if self.external is None else self.external.swapped

    @property
    def is_loaded_first(self) -> bool:
        """Whether it has to wait for its blocks."""
        return self.external is not None and self.external.is_async
