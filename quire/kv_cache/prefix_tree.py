"""Cached pages of groups that free pages: found by the whole prefix they end, although its other pages may be gone.

Owned by the block pool. A prefix has a name for as long as something that begins with it is cached or in use; names
are looked up by the tokens and extra keys themselves, page by page from the beginning, so a hit needs no hash to trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from quire.core.request import ExtraKeys
from quire.kv_cache.block_hash import TOKEN_BYTES, token_bytes

ROOT_NAME = 0
"""The empty prefix."""


class PrefixTree:
    """Names of prefixes of whole pages, each with the number of its users.

    A user is a row that ends with the prefix, a cached page that does, or a longer prefix by one page.
    """

    def __init__(self, block_size: int) -> None:
        self._page_bytes = TOKEN_BYTES * block_size
        self._names: dict[tuple[int, bytes, ExtraKeys], int] = {}
        self._keys: dict[int, tuple[int, bytes, ExtraKeys]] = {}
        self._num_users: dict[int, int] = {}
        self._last_name = ROOT_NAME

    def __len__(self) -> int:
        return len(self._names)

    def find(self, token_ids: np.ndarray, extra_keys: Mapping[int, ExtraKeys], max_pages: int) -> list[int]:
        """Names of the first prefixes of a sequence, one per page, up to the first that has none.

        Args:
            token_ids: [num_tokens] int32; enough for `max_pages` pages.
            extra_keys: page number -> its extra keys.
        """
        names: list[int] = []
        if not self._names:
            return names
        data, size = token_bytes(token_ids), self._page_bytes
        parent = ROOT_NAME
        for page in range(max_pages):
            name = self._names.get((parent, data[page * size : (page + 1) * size], extra_keys.get(page, ())))
            if name is None:
                break
            names.append(name)
            parent = name
        return names

    def advance(self, name: int, tokens: bytes, extra_keys: ExtraKeys) -> int:
        """A user of a prefix becomes one of the prefix that continues it by a page, which is named if need be."""
        key = (name, tokens, extra_keys)
        longer = self._names.get(key)
        if longer is None:
            self._last_name = longer = self._last_name + 1
            self._names[key], self._keys[longer], self._num_users[longer] = longer, key, 1
            return longer  # which uses the shorter one in place of the caller
        self._num_users[longer] += 1
        self.release(name)
        return longer

    def enter(self, token_ids: np.ndarray, extra_keys: Mapping[int, ExtraKeys], num_pages: int) -> int:
        """Add a user to the prefix of the first `num_pages` pages of a sequence, which is named if need be."""
        data, size, name = (
            token_bytes(token_ids[: num_pages * self._page_bytes // TOKEN_BYTES]),
            self._page_bytes,
            ROOT_NAME,
        )
        for page in range(num_pages):
            name = self.advance(name, data[page * size : (page + 1) * size], extra_keys.get(page, ()))
        return name

    def hold(self, name: int) -> None:
        """Add a user to a prefix that has one."""
        if name != ROOT_NAME:
            self._num_users[name] += 1

    def release(self, name: int) -> None:
        """Take a user off a prefix; those that have none left lose their name."""
        while name != ROOT_NAME:
            self._num_users[name] -= 1
            if self._num_users[name]:
                return
            del self._num_users[name]
            key = self._keys.pop(name)
            del self._names[key]
            name = key[0]


class PrefixPages:
    """Which page of a group ends which prefix. Of pages of equal content the first published is kept.

    Args:
        is_cached: [num_blocks] bool; kept up to date for the pages that are published here.
    """

    def __init__(self, is_cached: np.ndarray, block_size: int) -> None:
        self.tree = PrefixTree(block_size)
        self._is_cached = is_cached
        self._pages: dict[int, tuple[dict[int, int], int]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def publish(self, blocks: dict[int, int], name: int, block_id: int) -> None:
        """Make a full, computed page findable by the prefix it ends in a group's `blocks` (name -> page)."""
        if name in blocks:
            return
        self.tree.hold(name)
        blocks[name] = block_id
        self._pages[block_id] = (blocks, name)
        self._is_cached[block_id] = True

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Make those of these cached pages that were published here impossible to find; the others."""
        others = []
        for block_id in block_ids:
            page = self._pages.pop(block_id, None)
            if page is None:
                others.append(block_id)
                continue
            blocks, name = page
            del blocks[name]
            self._is_cached[block_id] = False
            self.tree.release(name)
        return others
