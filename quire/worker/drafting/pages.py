"""DraftPages: of which tokens the layers of a drafting model have keys and values. Owned by the model that drafts.

A drafting model computes no token when the target does: it fills what is missing when it is next asked for drafts. Its
layers have blocks from the same manager, so a block that the target found in the prefix cache, or got back from the
swap space, may hold the draft's keys and values or not. That is counted block by block, and nothing that was not
computed is ever read: the count of a block begins at 0 when the block is given out, and goes where its contents go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.scheduler_output import BlockCopies, NewBlocks, NewRequestData, SchedulerOutput
from quire.worker.block_tables import BlockTables


@dataclass(frozen=True, slots=True)
class _GroupCounts:
    """One KV cache group with layers that draft.

    Attributes:
        group: its number.
        tokens: [num_blocks + num_swap_blocks] int32; how many first tokens of each block of its pool are computed.
        first_id, num_blocks, first_swap_id, num_swap_blocks: which ids of a message are of its pool.
    """

    group: int
    tokens: np.ndarray
    first_id: int
    num_blocks: int
    first_swap_id: int
    num_swap_blocks: int

    def own(self, block_ids: np.ndarray, *, is_swap: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Which of these ids are of the pool, and the places of those in `tokens`."""
        first_id = self.first_swap_id if is_swap else self.first_id
        num_blocks = self.num_swap_blocks if is_swap else self.num_blocks
        is_own = (block_ids >= first_id) & (block_ids < first_id + num_blocks)
        return is_own, block_ids[is_own] - first_id + (self.num_blocks if is_swap else 0)

    def forget(self, block_ids: np.ndarray) -> None:
        """These blocks were given out, or have contents from elsewhere."""
        self.tokens[self.own(block_ids)[1]] = 0

    def copy(self, copies: BlockCopies, *, from_swap: bool = False, to_swap: bool = False) -> None:
        """Contents were copied, and what is computed with them."""
        is_own, sources = self.own(copies.source_ids, is_swap=from_swap)
        if len(sources):
            targets = self.own(copies.target_ids[is_own], is_swap=to_swap)[1]
            self.tokens[targets] = self.tokens[sources]


class DraftPages:
    """Counts of tokens, per block and per row.

    Args:
        groups: numbers of the KV cache groups that have layers of the drafting model; they keep whole sequences.
        most_drafts: of a row at once.

    Attributes:
        num_filled: [max_num_seqs] int32; first tokens of each row whose keys and values are computed and right.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, groups: Sequence[int], block_tables: BlockTables, most_drafts: int
    ) -> None:
        self._block_tables = block_tables
        self._block_size = kv_cache_config.block_size
        sizes = kv_cache_config.pool_sizes()
        first_ids, first_swap_ids = kv_cache_config.first_block_ids(), kv_cache_config.first_swap_block_ids()
        self._groups = []
        for group in groups:
            pool = kv_cache_config.groups[group].pool
            num_blocks, num_swap_blocks = sizes[pool].num_blocks, sizes[pool].num_swap_blocks
            tokens = np.zeros(num_blocks + num_swap_blocks, dtype=np.int32)
            ids = (first_ids[pool], num_blocks, first_swap_ids[pool], num_swap_blocks)
            self._groups.append(_GroupCounts(group, tokens, *ids))
        max_num_seqs = len(block_tables.tables[0])
        self.num_filled = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_written = np.zeros(max_num_seqs, dtype=np.int32)
        self._drafts = np.zeros((max_num_seqs, most_drafts), dtype=np.int32)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Take in what a message did to blocks; the tables have it already."""
        for one in self._groups:
            if len(scheduled.swap_outs):
                one.copy(scheduled.swap_outs, to_swap=True)
            if len(scheduled.swap_ins):
                one.copy(scheduled.swap_ins, from_swap=True)
        num_computed: dict[int, int] = {}
        if scheduled.new_reqs:
            num_computed = dict(zip(scheduled.rows.tolist(), scheduled.num_computed_tokens.tolist(), strict=True))
        for request in scheduled.new_reqs:
            self._place(request, num_computed.get(request.row, 0))
        self._append(scheduled.new_blocks)
        for one in self._groups:
            if len(scheduled.block_copies):
                one.copy(scheduled.block_copies)
            for transfer in () if scheduled.kv_transfers is None else scheduled.kv_transfers.loads:
                one.forget(transfer.block_ids)
        for request in scheduled.new_reqs:
            self._count(request.row, num_computed.get(request.row, 0))
        for fork in scheduled.row_updates.forks:
            self._count(fork.row, fork.num_tokens)

    def _place(self, request: NewRequestData, num_computed: int) -> None:
        """The blocks of a row behind those that it took over, or gets copies for, are new."""
        first_new = -(-num_computed // self._block_size)
        for one in self._groups:
            one.forget(request.block_ids[one.group][first_new:])

    def _append(self, new_blocks: tuple[NewBlocks, ...]) -> None:
        """New blocks hold nothing yet, even where the row had others in their place."""
        for one in self._groups:
            new = new_blocks[one.group]
            if len(new.rows):
                one.forget(new.block_ids)
                starts = new.columns * self._block_size
                np.minimum.at(self.num_filled, new.rows, starts)
                np.minimum.at(self._num_written, new.rows, starts)

    def _count(self, row: int, num_tokens: int) -> None:
        """How far the blocks of a row are filled without a gap, at most `num_tokens`."""
        filled = num_tokens
        for one in self._groups:
            table = self._block_tables.tables[one.group][row, : -(-num_tokens // self._block_size)]
            tokens = one.tokens[table]
            partly = np.flatnonzero(tokens < self._block_size)
            if len(partly):
                filled = min(filled, int(partly[0]) * self._block_size + int(tokens[partly[0]]))
        self.num_filled[row] = self._num_written[row] = filled

    def note(self, rows: np.ndarray, positions: np.ndarray, is_in_place: np.ndarray | None = None) -> None:
        """Keys and values of tokens were computed: [num_tokens] rows and positions, each row's without a gap.

        Args:
            is_in_place: [num_tokens] bool; False = they do not lie in their positions' slots, so that other rows cannot
                use them. None = all do.
        """
        shared_rows, shared = (rows, positions) if is_in_place is None else (rows[is_in_place], positions[is_in_place])
        ends = (shared % self._block_size + 1).astype(np.int32)
        for one in self._groups:
            blocks = self._block_tables.tables[one.group][shared_rows, shared // self._block_size]
            np.maximum.at(one.tokens, blocks, ends)
        np.maximum.at(self.num_filled, rows, positions.astype(np.int32) + 1)
        self._num_written[rows] = self.num_filled[rows]

    def note_drafts(self, rows: np.ndarray, drafts: np.ndarray, num_written: np.ndarray) -> None:
        """What was drafted behind the filled tokens: [n, .] ids, of which the first `num_written` [n] have keys."""
        width = min(drafts.shape[1], self._drafts.shape[1])
        self._drafts[rows, :width] = drafts[:, :width]
        num_written = np.minimum(num_written, width)
        self._num_written[rows] = self.num_filled[rows] + num_written

    def keep_right_drafts(self, rows: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Drafts that stand have keys and values already.

        Args:
            rows, num_tokens: [n] rows, and tokens of each, the newest included.
            token_ids: [max_num_seqs, .] int32; tokens of every row.
        """
        first = self.num_filled[rows]
        most = np.minimum(self._num_written[rows], num_tokens) - first
        if not (most > 0).any():
            return
        places = np.arange(self._drafts.shape[1])
        columns = np.minimum(first[:, None] + places, token_ids.shape[1] - 1)
        is_right = (token_ids[rows[:, None], columns] == self._drafts[rows]) & (places < most[:, None])
        counts = np.cumprod(is_right, axis=1).sum(axis=1)
        flat_rows = np.repeat(rows, counts)
        if len(flat_rows):
            shifts = first - (np.cumsum(counts) - counts)
            self.note(flat_rows, np.arange(len(flat_rows)) + np.repeat(shifts, counts))
        self._num_written[rows] = self.num_filled[rows]
