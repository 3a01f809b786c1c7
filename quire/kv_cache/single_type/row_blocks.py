"""The block table of one group, by row: what managers of every kind share.

Subclassed by the single-type managers. Owns which pages each row holds, and how many of them are published. A manager
is made from a spec of its kind and what all managers of a cache share (`ManagerParts`); `managers` has the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.scheduler_output import NewBlocks
from quire.kv_cache.block_hash import BlockHashFn
from quire.kv_cache.block_pool import BlockPool

NO_IDS = np.empty(0, dtype=np.int32)
NO_BLOCKS = NewBlocks(NO_IDS, NO_IDS, NO_IDS)
NEVER = np.iinfo(np.int32).max
"""As a number of published pages: none is to be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerParts:
    """What the managers of a cache share.

    Attributes:
        max_num_seqs: number of rows.
        max_model_len: most tokens of a row.
        max_chunk_tokens: most tokens of one row that a step computes.
        hash_fn: names a page by its content.
    """

    pool: BlockPool
    max_num_seqs: int
    max_model_len: int
    max_chunk_tokens: int
    hash_fn: BlockHashFn


class RowBlocks(ABC):
    """Page i of a row holds its tokens i * block_size .. (i + 1) * block_size - 1, unless its kind says otherwise."""

    def __init__(self, spec: KVCacheSpec, parts: ManagerParts) -> None:
        block_size, max_num_seqs = spec.block_size, parts.max_num_seqs
        self._pool = parts.pool
        self._block_size = block_size
        self._block_table = np.zeros((max_num_seqs, -(-parts.max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_published = np.zeros(max_num_seqs, dtype=np.int32)
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._offsets = np.arange(block_size)

    def block_ids(self, row: int) -> np.ndarray:
        """Pages of a row, in order, [num_blocks] int32, the null page where one was freed; not to be written."""
        return self._block_table[row, : self._num_blocks[row]]

    def first_page(self, num_tokens: int) -> int:
        """First page that a query after `num_tokens` tokens sees."""
        return 0

    def computed_pages(self, row: int, num_tokens: int) -> np.ndarray | None:
        """Pages with those of a row's first `num_tokens` tokens that a query after them sees, a copy; None = freed."""
        block_ids = np.array(self.block_ids(row)[self.first_page(num_tokens) : -(-num_tokens // self._block_size)])
        return block_ids if block_ids.all() else None

    def num_new_blocks(self, num_cached_tokens: int, num_tokens: int) -> int:
        """Free pages that a request takes behind a cached prefix, to hold `num_tokens` tokens."""
        return self.num_blocks_behind(num_cached_tokens // self._block_size, num_tokens)

    def num_blocks_behind(self, num_pages: int, num_tokens: int) -> int:
        """Free pages that `extend` takes for `num_tokens` tokens; a row has `num_pages` pages, freed ones included."""
        return -(-num_tokens // self._block_size) - num_pages

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] pages that rows lack to hold `num_tokens` ([num_rows]) tokens."""
        needed = (num_tokens + (self._block_size - 1)) // self._block_size
        missing: np.ndarray = np.maximum(needed - self._num_blocks[rows], 0)
        return missing

    @abstractmethod
    def share(self, row: int, request: Request, cached_block_ids: np.ndarray, num_cached_pages: int) -> None:
        """Give an empty row the pages that its next query sees of a cached prefix of its request."""

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> NewBlocks:
        """Give each row `num_missing` ([num_rows]) pages more; they must be free."""
        due = np.flatnonzero(num_missing)
        if not len(due):
            return NO_BLOCKS
        rows, num_missing = rows[due], num_missing[due]
        flat_rows, columns = spread(rows, self._num_blocks[rows], num_missing)
        block_ids = self._pool.take(len(flat_rows))
        self._block_table[flat_rows, columns] = block_ids
        self._num_blocks[rows] += num_missing.astype(np.int32)
        return NewBlocks(flat_rows.astype(np.int32), columns.astype(np.int32), block_ids)

    def extend(self, row: int, num_tokens: int) -> np.ndarray:
        """Give a row free pages up to `num_tokens` tokens; all its pages, a copy."""
        held, num_blocks = int(self._num_blocks[row]), -(-num_tokens // self._block_size)
        if num_blocks > held:
            self._block_table[row, held:num_blocks] = self._pool.take(num_blocks - held)
            self._num_blocks[row] = num_blocks
        return np.array(self.block_ids(row))

    def free_beyond(self, row: int, num_tokens: int) -> None:
        """Give up the row's pages that hold none of its first `num_tokens` tokens; none of them was published."""
        held, num_blocks = int(self._num_blocks[row]), -(-num_tokens // self._block_size)
        if num_blocks < held:
            self._pool.free(self._block_table[row, num_blocks:held])
            self._num_blocks[row] = num_blocks

    def publish(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Make pages that are full and computed findable.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        num_full = num_computed_tokens // self._block_size
        num_due = num_full - self._num_published[rows]
        due = np.flatnonzero(num_due > 0)
        if not len(due):
            return
        rows = rows[due]
        flat_rows, pages = spread(rows, self._num_published[rows], num_due[due])
        block_ids = self._block_table[flat_rows, pages]
        first_tokens = flat_rows * token_ids.shape[1] + pages * self._block_size
        page_tokens = token_ids.reshape(-1).take(first_tokens[:, None] + self._offsets)
        self._publish_pages(flat_rows.tolist(), pages.tolist(), block_ids, page_tokens)
        self._num_published[rows] = num_full[due]

    @abstractmethod
    def _publish_pages(self, rows: list[int], pages: list[int], block_ids: np.ndarray, page_tokens: np.ndarray) -> None:
        """Make pages findable; those of a row come in order.

        Args:
            rows, pages: [num_pages] whose each is, and its number there.
            block_ids: [num_pages] int32.
            page_tokens: [num_pages, block_size] int32.
        """

    @abstractmethod
    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""

    def _request_on(self, row: int) -> Request:
        request = self._requests[row]
        assert request is not None, "a row that computed tokens belongs to a request"
        return request


def spread(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in a table: starts[0], starts[0] + 1, ... of rows[0] (counts[0] of them), then those of rows[1], ...

    Returns:
        Rows and columns; the arguments themselves where there is one place in each row, as in most steps.
    """
    ends = np.cumsum(counts)
    if ends[-1] == len(rows):  # every count is at least 1
        return rows, starts
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(starts, counts) + within
