"""Candidate: a request without a row as it would be admitted to a step. A value, made by admission for one check."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Request
from quire.kv_cache.manager import CachedPrefix
from quire.kv_cache.swap_pool import SwappedPages


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is cached of a request, and how many tokens it would compute.

    `swapped` are its pages in the swap space, where these hold more of it than the cache.
    """

    request: Request
    prefix: CachedPrefix
    num_new_tokens: int
    swapped: SwappedPages | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values it would begin with."""
        return self.prefix.num_tokens if self.swapped is None else self.swapped.num_tokens
