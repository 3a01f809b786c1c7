"""BlockTables: which blocks hold the tokens of the requests on rows, one table per KV cache group.

Owned by the model runner; a copy of what the scheduler decided, written from its messages alone.
"""

from __future__ import annotations

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.scheduler_output import NewBlocks


class BlockTables:
    """Fixed rows of block ids, on the host.

    Attributes:
        tables: per group: [max_num_seqs, max_blocks_per_req] int32; beyond a request's blocks 0 (the null block),
            or blocks that it has given back.
        block_sizes: per group: tokens per block.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, max_num_seqs: int, max_model_len: int) -> None:
        self.block_sizes = tuple(group.spec.block_size for group in kv_cache_config.groups)
        self.tables = tuple(
            np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32) for block_size in self.block_sizes
        )

    def set_row(self, row: int, block_ids: tuple[np.ndarray, ...]) -> None:
        """A request was placed on `row`: its blocks per group, [num_blocks] int32, replace what was there."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table[row, len(ids) :] = 0
            table[row, : len(ids)] = ids

    def append(self, new_blocks: tuple[NewBlocks, ...]) -> None:
        """Blocks appended to running rows, per group."""
        for table, new in zip(self.tables, new_blocks, strict=True):
            table[new.rows, new.columns] = new.block_ids

    def gather(self, group: int, rows: np.ndarray, max_seq_len: int) -> np.ndarray:
        """[num_reqs, num_blocks] int32; the blocks of `rows`, as many columns as `max_seq_len` tokens need."""
        num_blocks = -(-max_seq_len // self.block_sizes[group])
        return self.tables[group][rows, :num_blocks]

    def slots(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[num_tokens] int64; where the tokens at `positions` of `rows` (both [num_tokens]) are kept."""
        block_size = self.block_sizes[group]
        blocks = self.tables[group][rows, positions // block_size].astype(np.int64)
        slots: np.ndarray = blocks * block_size + positions % block_size
        return slots
