"""Which page holds which prefix: hash -> page, each hit checked against the page's real content.

Owned by the block pool. Owns the hashes and links of cached pages, and the token pages.
A hit must match in its tokens, its extra keys and its link to the page before it, so no hash function,
however poor, can make a request read keys and values of another prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from quire.core.request import ExtraKeys
from quire.kv_cache.token_pages import TokenPages

ROOT_PREFIX_ID = 0
"""The empty prefix, parent of every first page."""


CachedPage = tuple[bytes, int, int, ExtraKeys]
"""Hash, prefix id, prefix id of the page before, extra keys. A plain tuple: one is made for every full page."""


class PrefixIndex:
    """The cached pages, by hash. Of pages with equal content the first published is kept.

    A prefix id names the prefix that ends with a certain page, from its publication until it is forgotten;
    it is never used again.

    Attributes:
        is_cached: [num_blocks] bool; pages that can be found. Read-only for others.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.is_cached = np.zeros(num_blocks, dtype=np.bool_)
        self._token_pages = TokenPages(num_blocks, block_size)
        self._block_of_hash: dict[bytes, int] = {}
        self._pages: dict[int, CachedPage] = {}
        self._last_prefix_id = ROOT_PREFIX_ID

    def __len__(self) -> int:
        return len(self._pages)

    def find(
        self, block_hashes: Sequence[bytes], token_ids: np.ndarray, extra_keys: Mapping[int, ExtraKeys]
    ) -> np.ndarray:
        """Pages of the longest cached prefix, in order.

        Args:
            block_hashes: of the pages looked for, in order.
            token_ids: [num_tokens] int32; enough for all of them.
            extra_keys: page number -> its extra keys.

        Returns:
            [num_found] int32.
        """
        found: list[int] = []
        parent_id = ROOT_PREFIX_ID
        for page, block_hash in enumerate(block_hashes):
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            _, prefix_id, *links = self._pages[block_id]
            if links != [parent_id, extra_keys.get(page, ())]:
                break
            found.append(block_id)
            parent_id = prefix_id
        block_ids = np.array(found, dtype=np.int32)
        return block_ids[: self._token_pages.num_matching(block_ids, token_ids)] if found else block_ids

    def prefix_id(self, block_ids: np.ndarray) -> int:
        """Name of the prefix that these cached pages, in order, hold."""
        return self._pages[int(block_ids[-1])][1] if len(block_ids) else ROOT_PREFIX_ID

    def write_tokens(self, block_ids: np.ndarray, token_ids: np.ndarray) -> None:
        """Note what full pages hold, before they are published; `token_ids` is [num_pages, block_size]."""
        self._token_pages.write(block_ids, token_ids)

    def publish(self, block_id: int, block_hash: bytes, parent_id: int, extra_keys: ExtraKeys) -> int:
        """Make a full, computed page findable, unless one of equal content already is.

        A page of other content under the same hash is forgotten: it collides, or its parent was evicted and it
        can no longer be reached.

        Returns:
            The prefix id that the next page of the sequence has as its parent.
        """
        twin = self._block_of_hash.get(block_hash)
        if twin is not None:
            _, prefix_id, *links = self._pages[twin]
            if links == [parent_id, extra_keys] and self._token_pages.are_equal(twin, block_id):
                return prefix_id
            self.forget([twin])
        self._last_prefix_id += 1
        self._block_of_hash[block_hash] = block_id
        self._pages[block_id] = (block_hash, self._last_prefix_id, parent_id, extra_keys)
        self.is_cached[block_id] = True
        return self._last_prefix_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make cached pages impossible to find."""
        for block_id in block_ids:
            block_hash, *_ = self._pages.pop(block_id)
            del self._block_of_hash[block_hash]
            self.is_cached[block_id] = False
