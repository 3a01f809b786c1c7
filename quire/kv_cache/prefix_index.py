"""Which page holds which prefix: hash -> page, each hit checked against the page's real content.

Owned by the block pool. Owns the hashes and links of cached pages, and the token pages.
A hit must match in its tokens, its extra keys and its link to the page before it, so no hash function,
however poor, can make a request read keys and values of another prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.core.cache_info import MissReason
from quire.core.request import ExtraKeys
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.past_pages import PastPages
from quire.kv_cache.salted_pages import SaltedPages
from quire.kv_cache.sibling_pages import SiblingPages
from quire.kv_cache.token_pages import TokenPages

ROOT_PREFIX_ID = 0
"""The empty prefix, parent of every first page."""

LOST_PREFIX_ID = -1
"""A prefix that cannot be found: nothing after it is stored."""

CachedPage = tuple[bytes, int, int, ExtraKeys, int]
"""Hash, prefix id, prefix id of the page before, extra keys, template id. A plain tuple: one for every full page."""


class PrefixIndex:
    """The cached pages, by hash. Of pages with equal content the first published is kept.

    A prefix id names the prefix that ends with a certain page, from its publication until it is forgotten;
    it is never used again. A page is forgotten together with those after it, so whatever is indexed can be found.

    Attributes:
        is_cached: [num_blocks] bool; pages that can be found. Read-only for others.
        past: pages that cannot be found (any longer), and why.
        siblings: the cached pages by what they follow.
        salted: those with extra keys by their content.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.is_cached = np.zeros(num_blocks, dtype=np.bool_)
        self.past = PastPages(num_blocks)
        self.siblings = SiblingPages()
        self.salted = SaltedPages()
        self._token_pages = TokenPages(num_blocks, block_size)
        self._block_of_hash: dict[bytes, int] = {}
        self._pages: dict[int, CachedPage] = {}
        self._block_of_prefix: dict[int, int] = {}
        self._is_watched = False
        self._note_stored: Callable[[bytes, bytes | None, list[int], ExtraKeys], None] = _tell_nobody
        self._note_removed: Callable[[bytes], None] = _tell_nobody
        self._note_cleared: Callable[[], None] = _tell_nobody
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
            _, prefix_id, *links, _ = self._pages[block_id]
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

    def publish(
        self, block_id: int, block_hash: bytes, parent_id: int, extra_keys: ExtraKeys, template_id: int = 0
    ) -> int:
        """Make a full, computed page findable, unless one of equal content already is, or its parent is not.

        A page of other content under the same hash, which collides, is forgotten.

        Returns:
            The prefix id that the next page of the sequence has as its parent.
        """
        twin = self._block_of_hash.get(block_hash)
        if twin is not None:
            _, prefix_id, *links, _ = self._pages[twin]
            if links == [parent_id, extra_keys] and self._token_pages.are_equal(twin, block_id):
                return prefix_id
            self.forget([twin])
        if parent_id != ROOT_PREFIX_ID and parent_id not in self._block_of_prefix:
            return LOST_PREFIX_ID
        self._last_prefix_id = prefix_id = self._last_prefix_id + 1
        self._block_of_hash[block_hash] = block_id
        self._pages[block_id] = (block_hash, prefix_id, parent_id, extra_keys, template_id)
        self._block_of_prefix[prefix_id] = block_id
        self.siblings.add(block_id, parent_id, extra_keys)
        if extra_keys:
            self.salted.add(parent_id, self._token_pages.content(block_id), extra_keys)
        self.is_cached[block_id] = True
        if self._is_watched:
            parent_hash = None if parent_id == ROOT_PREFIX_ID else self.hash_of_prefix(parent_id)
            self._note_stored(block_hash, parent_hash, self._token_pages.tokens(block_id), extra_keys)
        return prefix_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make cached pages impossible to find, and with them the pages after them."""
        due = list(block_ids)
        while due:
            page = self._pages.pop(due.pop(), None)
            if page is None:
                continue  # it went with the page before it
            block_hash, prefix_id, parent_id, extra_keys, _ = page
            del self._block_of_hash[block_hash]
            block_id = self._block_of_prefix.pop(prefix_id)
            self.siblings.remove(block_id, parent_id, extra_keys)
            if extra_keys:
                self.salted.remove(parent_id, self._token_pages.content(block_id), extra_keys)
            self.is_cached[block_id] = False
            self.past.note(block_hash, MissReason.EVICTED)
            if self._is_watched:
                self._note_removed(block_hash)
            due += self.siblings.all_after(prefix_id)

    def clear(self) -> None:
        """Make all pages impossible to find."""
        self.past.note_reset(self._block_of_hash)
        self._block_of_hash, self._pages, self._block_of_prefix = {}, {}, {}
        self.siblings, self.salted = SiblingPages(), SaltedPages()
        self.is_cached[:] = False
        self._note_cleared()

    def watch(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` of every change from now on."""
        self._is_watched = True
        self._note_stored, self._note_removed = recorder.note_stored, recorder.note_removed
        self._note_cleared = recorder.note_cleared

    # --- what the pages are, for whoever explains a miss ---

    def block_of(self, block_hash: bytes) -> int | None:
        """The cached page of this name; it may hold other content, when names collide."""
        return self._block_of_hash.get(block_hash)

    def template_id(self, block_id: int) -> int:
        """The chat template with which a cached page's prompt was made; 0 = none."""
        return self._pages[block_id][4]

    def hash_of_prefix(self, prefix_id: int) -> bytes:
        """The name of the page that a prefix ends with; the prefix is not empty and can be found."""
        return self._pages[self._block_of_prefix[prefix_id]][0]

    def num_equal_tokens(self, block_ids: Sequence[int], token_ids: np.ndarray) -> np.ndarray:
        """[num_blocks]: how many leading tokens of each page are those of `token_ids` ([block_size])."""
        return self._token_pages.num_equal(np.array(block_ids, dtype=np.int32), token_ids)


def _tell_nobody(*_: Any) -> None:
    """Who is told of changes when nobody watches."""
