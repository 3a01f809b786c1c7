"""The token ids each cached page was computed from, kept beside the pages.

Owned by the prefix index, which compares them on a hit, so that a hash collision is a miss.
"""

from __future__ import annotations

import numpy as np

from quire.kv_cache.block_hash import token_bytes


class TokenPages:
    """[num_blocks, block_size] int32; memory of pages never written is not touched."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros((num_blocks, block_size), dtype=np.int32)

    def write(self, block_ids: np.ndarray, token_ids: np.ndarray) -> None:
        """Set the pages' tokens; `token_ids` is [num_pages, block_size]."""
        self._token_ids[block_ids] = token_ids

    def num_matching(self, block_ids: np.ndarray, token_ids: np.ndarray) -> int:
        """How many leading pages hold exactly the leading tokens of `token_ids` ([num_tokens], enough for all)."""
        wanted = token_ids[: len(block_ids) * self._block_size].reshape(len(block_ids), self._block_size)
        differs = (self._token_ids.take(block_ids, axis=0) != wanted).any(axis=1)
        return int(differs.argmax()) if differs.any() else len(block_ids)

    def are_equal(self, block_id: int, other: int) -> bool:
        """True when two pages hold the same tokens."""
        return bool((self._token_ids[block_id] == self._token_ids[other]).all())

    def tokens(self, block_id: int) -> list[int]:
        """What a page holds."""
        tokens: list[int] = self._token_ids[block_id].tolist()
        return tokens

    def content(self, block_id: int) -> bytes:
        """What a page holds, as it is hashed."""
        return token_bytes(self._token_ids[block_id])

    def num_equal(self, block_ids: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """[num_blocks]: how many leading tokens of each page are those of `token_ids` ([block_size])."""
        differs = self._token_ids.take(block_ids, axis=0) != token_ids
        counts: np.ndarray = differs.argmax(axis=1)
        counts[(counts == 0) & ~differs[:, 0]] = self._block_size
        return counts
