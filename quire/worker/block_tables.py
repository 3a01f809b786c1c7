"""BlockTables: which blocks hold the tokens of the requests on rows, one table per KV cache group.

Owned by the model runner; a copy of what the scheduler decided, written from its messages alone. Here blocks are
numbered within their pool, as they lie in its tensors. The blocks of recurrent layers come anew with each step, so
these groups have tables without columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import KVCacheConfig, MambaSpec
from quire.core.scheduler_output import DraftTokens, NewBlocks, StateBlocks


class BlockTables:
    """Fixed rows of block ids, on the host.

    Attributes:
        tables: per group: [max_num_seqs, max_blocks_per_req] int32; beyond a request's blocks 0 (the null block),
            or blocks that it has given back.
        block_sizes: per group: tokens per block.
        has_state: per group: whether its layers are recurrent.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, max_num_seqs: int, max_model_len: int) -> None:
        self.block_sizes = tuple(group.spec.block_size for group in kv_cache_config.groups)
        self.has_state = tuple(isinstance(group.spec, MambaSpec) for group in kv_cache_config.groups)
        self.tables = tuple(
            np.zeros((max_num_seqs, 0 if has_state else -(-max_model_len // block_size)), dtype=np.int32)
            for block_size, has_state in zip(self.block_sizes, self.has_state, strict=True)
        )
        first_ids = kv_cache_config.first_block_ids()
        self._first_ids = tuple(first_ids[group.pool] for group in kv_cache_config.groups)

    def set_row(self, row: int, block_ids: tuple[np.ndarray, ...]) -> None:
        """A request was placed on `row`: its blocks per group, [num_blocks] int32, replace what was there."""
        for table, ids, first_id in zip(self.tables, block_ids, self._first_ids, strict=True):
            if not table.shape[1]:
                continue
            table[row, len(ids) :] = 0
            table[row, : len(ids)] = _within_pool(ids, first_id)

    def append(self, new_blocks: tuple[NewBlocks, ...]) -> None:
        """Blocks appended to running rows, per group."""
        for table, new, first_id in zip(self.tables, new_blocks, self._first_ids, strict=True):
            table[new.rows, new.columns] = _within_pool(new.block_ids, first_id)

    def states(self, states: Sequence[StateBlocks]) -> tuple[StateBlocks, ...]:
        """A step's blocks of recurrent layers, for each group that has such."""
        return tuple(
            StateBlocks(np.where(one.read_block_ids < 0, -1, one.read_block_ids - first), one.write_block_ids - first)
            for one, first in zip(states, self._state_first_ids(), strict=True)
        )

    def draft_states(self, drafts: DraftTokens | None) -> tuple[np.ndarray, ...]:
        """The blocks of `DraftTokens.state_block_ids`."""
        if drafts is None or not drafts.state_block_ids:
            return ()
        return tuple(ids - first for ids, first in zip(drafts.state_block_ids, self._state_first_ids(), strict=True))

    def _state_first_ids(self) -> list[np.int32]:
        """The first block id of each group that has states."""
        return [
            np.int32(first_id) for first_id, has_state in zip(self._first_ids, self.has_state, strict=True) if has_state
        ]

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


def _within_pool(block_ids: np.ndarray, first_id: int) -> np.ndarray:
    """The numbers of blocks within the pool that begins with `first_id`; the null block is 0."""
    return np.maximum(block_ids - first_id, 0) if first_id else block_ids
