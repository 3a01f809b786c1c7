"""MissExplainer: why the cached prefix of a request ends where it does. Owned by the KV cache manager.

Asked once for each admission; the work is bounded, whatever is cached: some lookups by name and at most `MAX_SIBLINGS`
pages compared. Of pages with other extra keys (salts, tenants) only `operator_reason` tells: nothing else that is
answered depends on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.cache_salt import tenant_part
from quire.core.request import Request
from quire.kv_cache.block_hash import ROOT_HASH, BlockHashFn, token_bytes
from quire.kv_cache.prefix_index import ROOT_PREFIX_ID, PrefixIndex

MAX_SIBLINGS = 64
MAX_EXTRA_KEYS = 16

IsComputing = Callable[[int, int, bytes], bool]
"""(prefix id, page number, its name): whether a running request is about to publish this page."""


class MissExplainer:
    """Explains misses in one prefix index.

    Args:
        index: the cached pages.
        block_size: tokens per page.
        hash_fn: names a page.
        is_computing: knows what running requests are about to publish.
    """

    def __init__(self, index: PrefixIndex, block_size: int, hash_fn: BlockHashFn, is_computing: IsComputing) -> None:
        self._index = index
        self._block_size = block_size
        self._hash_fn = hash_fn
        self._is_computing = is_computing

    def explain(self, request: Request, cached_block_ids: np.ndarray) -> CacheMiss | None:
        """Why no more than these pages of `request` were found; None when all that can be used were."""
        num_found, num_tokens = len(cached_block_ids), len(request.token_ids)
        num_usable, end = (num_tokens - 1) // self._block_size, num_found * self._block_size
        if num_usable > num_found >= len(request.block_hashes):
            return None  # a preempted request's own new tokens, which fill no computed page
        if num_found and not self._index.is_cached[cached_block_ids[-1]]:
            return None  # pages of a sibling that runs
        if num_found == num_usable:
            if num_found < len(request.block_hashes) and self._index.block_of(request.block_hashes[num_found]):
                return CacheMiss(MissReason.LAST_TOKEN, end)
            return CacheMiss(MissReason.BELOW_ONE_PAGE, 0) if not num_usable else None
        parent_id = self._index.prefix_id(cached_block_ids)
        block_hash = request.block_hashes[num_found]
        reason = self._past_reason(parent_id, num_found, block_hash)
        if reason is not None:
            return CacheMiss(reason, end)
        nearest = self._nearest_sibling(request, num_found, parent_id)
        reason, position = nearest if nearest is not None else (MissReason.COLD, end)
        return CacheMiss(reason, position, self._foreign_reason(request, num_found, parent_id))

    def _past_reason(self, parent_id: int, page: int, block_hash: bytes) -> MissReason | None:
        """What is known of the very page that is missing."""
        if self._is_computing(parent_id, page, block_hash):
            return MissReason.STILL_COMPUTING
        return self._index.past.reason(block_hash)

    def _nearest_sibling(self, request: Request, page: int, parent_id: int) -> tuple[MissReason, int] | None:
        """Of cached pages after the same prefix, with the same extra keys, the one that agrees longest."""
        start = page * self._block_size
        extra_keys = request.extra_keys.get(page, ())
        siblings = self._index.siblings.after(parent_id, extra_keys, MAX_SIBLINGS)
        if not siblings:
            return None
        num_equal = self._index.num_equal_tokens(siblings, request.token_ids[start : start + self._block_size])
        longest = int(num_equal.max())
        if not longest and not start:
            return None  # they have nothing in common
        nearest = itertools.compress(siblings, num_equal == longest)
        if longest == self._block_size:
            return MissReason.EVICTED, start  # it is there, but pages of windowed layers are gone
        template_ids = {self._index.template_id(block_id) for block_id in nearest}
        own_id = request.message.template_id
        is_other_template = own_id and 0 not in template_ids and own_id not in template_ids
        reason = MissReason.TEMPLATE_CHANGED if is_other_template else MissReason.DIFFERENT_TOKEN
        return reason, start + longest

    def _foreign_reason(self, request: Request, page: int, parent_id: int) -> MissReason | None:
        """Whether the missing page is cached with other extra keys, and with which kind."""
        own_keys = request.extra_keys.get(page, ())
        start = page * self._block_size
        tokens = token_bytes(request.token_ids[start : start + self._block_size])
        known = self._index.salted.keys_of(parent_id, tokens, MAX_EXTRA_KEYS)
        found = [keys for keys in known if keys != own_keys]
        if own_keys:
            parent = ROOT_HASH if parent_id == ROOT_PREFIX_ID else self._index.hash_of_prefix(parent_id)
            if self._index.block_of(self._hash_fn(parent, tokens, ())) is not None:
                found.append(())
        return min((_difference(dict(own_keys), dict(keys)) for keys in found), default=None)


def _difference(own_keys: dict[str, str], other_keys: dict[str, str]) -> MissReason:
    """What differs between the extra keys of two pages of the same tokens."""
    own_salt, other_salt = own_keys.get("cache_salt", ""), other_keys.get("cache_salt", "")
    if own_salt == other_salt:
        return MissReason.ADAPTER
    return MissReason.OTHER_SALT if tenant_part(own_salt) == tenant_part(other_salt) else MissReason.OTHER_TENANT
