"""A tier that keeps pages of ended requests in a dictionary, by the names of the pages: the scheduler's half.

All that a tier has to decide is here; the worker's halves are pretended (`test_dictionary_tier`) or real
(`tests/unit/engine/test_kv_tier.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.kv_cache.stored_prefix import group_name, longest_stored_prefix
from quire.scheduler.kv_tier import ExternalHit, KVTier


class DictionaryTier(KVTier):
    """Knows which pages are kept.

    Args:
        is_async: whether a request waits for its load, by its handle.
        specs: of the KV cache groups, where there is not one that keeps whole sequences; loads are then asynchronous.
    """

    def __init__(
        self,
        block_size: int,
        is_async: Callable[[int], bool] = lambda handle: False,
        specs: Sequence[KVCacheSpec] = (),
    ) -> None:
        self.keeps_groups = len(specs) > 0
        self._specs = specs
        self._block_size = block_size
        self._is_async = is_async
        self.keys: set[bytes] = set()
        self.copies_at_once = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        num_pages = num_computed_tokens // self._block_size
        if self._specs:
            most = (len(request.token_ids) - 1) // self._block_size
            num_pages = longest_stored_prefix(self._specs, partial(self._find, request), num_pages, most)
            num_tokens = num_pages * self._block_size
            return ExternalHit(num_tokens, is_async=True) if num_tokens > num_computed_tokens else None
        while num_pages < len(request.block_hashes) and request.block_hashes[num_pages] in self.keys:
            num_pages += 1
        num_tokens = num_pages * self._block_size
        if num_tokens <= num_computed_tokens:
            return None
        return ExternalHit(num_tokens, self._is_async(request.handle))

    def _find(self, request: Request, group: int, first: int, end: int) -> np.ndarray:
        return np.array([group_name(name, group) in self.keys for name in request.block_hashes[first:end]], np.bool_)

    def request_finished(self, request: Request, keys: Sequence[bytes], block_ids: np.ndarray) -> Sequence[bytes]:
        if self._specs:
            return [key for key in keys if key not in self.keys]
        return [] if not keys or keys[-1] in self.keys else keys

    def blocks_to_copy(self, request: Request, keys: Sequence[bytes]) -> Sequence[bytes]:
        copied = [key for key in keys if self.copies_at_once and key not in self.keys]
        self.keys.update(copied)  # if the step fails they are not there, and loads of them fail
        return copied

    def transfer_ended(self, keys: Sequence[bytes], *, is_save: bool, is_done: bool) -> None:
        if is_save and is_done:
            self.keys.update(keys)
        elif not is_save and not is_done:
            self.keys.difference_update(keys)
