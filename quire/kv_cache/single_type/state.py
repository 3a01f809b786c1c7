"""Blocks of layers with a recurrent state: each holds the state of a sequence after some number of its tokens.

Called by the coordinator. Owns which blocks each row reads and writes. A state cannot be cut back, so one that is kept
for other requests (a checkpoint) is a block that is not written any longer: the row goes on in another, and nothing is
copied.

Example, blocks of 16 tokens, a prompt of 40 tokens:

    step of tokens 0-31:  reads nothing, writes block 5     # cut at the last full block of the prompt
    step of tokens 32-39: reads 5, writes 6                 # 5 can be found: "state after 32 tokens"
    token 40:             reads 6, writes 6                 # in place, while it decodes
    token 47:             reads 6, writes 6                 # 48 tokens: a full block, 6 can be found
    token 48:             reads 6, writes 7

A request that begins with the same 32 tokens reads block 5, and writes a block of its own.

A step with drafts has a block more for each: for the state before it. When it is known which drafts stand, one of these
states is the row's, and the other blocks are free again:

    token 41, drafts 42, 43: reads 6, writes 8 (after 41), 9 (after 42), 6 (after 43)
    draft 42 stands:         the row goes on from 9; 6 and 8 are free
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import MambaSpec
from quire.core.scheduler_output import NewBlocks, StateBlocks
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.prefix_tree import ROOT
from quire.kv_cache.row_prefixes import FilledBlocks
from quire.kv_cache.single_type.row_blocks import NO_BLOCKS, NO_IDS, ManagerParts, RowBlocks

BEGINS_ANEW = -1
"""As a block to be read: there is no state before the first token."""


class StateManager(RowBlocks):
    """A row has the block that it writes, and for a step the one that it reads where that is another.

    A row that has come to a border keeps its state there, if a block is free to go on in; else it goes on in place.
    While it decodes, every full block is such a border, and its newest checkpoint takes the place of the one before.
    """

    def __init__(self, spec: MambaSpec, parts: ManagerParts, group: int) -> None:
        super().__init__(spec, parts, group)
        self._block_table = np.zeros((0, 0), dtype=np.int32)
        self._own = np.zeros(parts.max_num_seqs, dtype=np.int32)
        self._source = np.zeros(parts.max_num_seqs, dtype=np.int32)  # read in place of its own; 0 = none
        self._position = np.zeros(parts.max_num_seqs, dtype=np.int32)  # tokens after which the newest state is
        self._is_kept = np.zeros(parts.max_num_seqs, dtype=np.bool_)
        self._due: dict[int, list[tuple[int, int, bool]]] = {}  # by row: block of tokens, block, is it of decoding
        self._being_read: dict[int, list[tuple[int, int]]] = {}  # by row: tokens when the step is done, block
        self._newest: dict[int, tuple[int, int]] = {}  # by row: prefix and block of its newest checkpoint of decoding
        self._before_drafts: dict[int, np.ndarray] = {}  # by row: blocks of the states before each of its drafts

    def block_ids(self, row: int) -> np.ndarray:
        """The block with the row's newest computed state, [1] int32; empty = it has none."""
        block_id = self._source[row] or self._own[row]
        return np.array([block_id], dtype=np.int32) if block_id else NO_IDS

    def is_at(self, row: int, num_tokens: int) -> bool:
        """Whether the row's newest state is that after so many tokens."""
        return int(self._position[row]) == num_tokens

    def computed_blocks(self, row: int, num_tokens: int) -> np.ndarray | None:
        """None: the state of earlier tokens is found in the prefix cache, or it is overwritten."""
        return None

    def num_new_blocks(self, num_shared: int, num_blocks: int, num_tokens: int) -> int:
        """As `RowBlocks`: the block that it writes."""
        return 1

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """As `RowBlocks`: one for a row that computes more and whose newest state others use."""
        missing: np.ndarray = self._must_go_on(rows, num_tokens) & self._pool.has_other_users(self._own[rows])
        return missing.astype(np.int32)

    def _must_go_on(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] bool; rows whose newest state is kept, and that are to compute up to `num_tokens` tokens."""
        must_go_on: np.ndarray = self._is_kept[rows] & (num_tokens > self._position[rows])
        return must_go_on

    def share(self, row: int, cached_block_ids: np.ndarray, num_blocks: int) -> None:
        """As `RowBlocks`: an empty row reads the state at the end of a prefix of `num_blocks` blocks."""
        if len(cached_block_ids):
            self._pool.share(cached_block_ids)
            self._source[row] = cached_block_ids[0]
            self._position[row] = num_blocks * self._block_size

    def extend(self, row: int, num_tokens: int) -> np.ndarray:
        """As `RowBlocks`: the block that it writes."""
        if not self._own[row]:
            self._own[row] = self._pool.take(1, self._pool_number)[0]
        return np.array([self._own[row]], dtype=np.int32)

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> NewBlocks:
        """As `RowBlocks`; the worker learns of it by the step's blocks."""
        if num_missing.any():
            self._go_on(rows[num_missing > 0])
        return NO_BLOCKS

    def _go_on(self, rows: np.ndarray) -> None:
        """These rows keep their newest states, and go on in free blocks."""
        self._source[rows] = self._own[rows]
        self._own[rows] = self._pool.take(len(rows), self._pool_number)
        self._is_kept[rows] = False

    def settle(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """These rows compute up to `num_tokens` tokens: kept states stay, as far as there are blocks to go on in."""
        due = rows[self._must_go_on(rows, num_tokens)]
        if not len(due):
            return
        num_free = self._pool.free_counts()[self._pool_number]
        self._go_on(due[:num_free])
        in_place = due[num_free:]
        self._pool.drop(self._own[in_place])
        self._is_kept[in_place] = False
        for row in in_place.tolist():
            self._due.pop(row, None)

    def plan(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> StateBlocks:
        """The blocks of a step in which rows ([num_reqs]) compute their tokens from `starts` to `ends`."""
        own, source = self._own[rows], self._source[rows]
        read = np.where(source > 0, source, np.where(starts > 0, own, np.int32(BEGINS_ANEW)))
        self._position[rows] = ends
        for i in np.flatnonzero(source).tolist():
            self._being_read.setdefault(int(rows[i]), []).append((int(ends[i]), int(source[i])))
        self._source[rows] = 0
        return StateBlocks(read, own)

    @property
    def num_free(self) -> int:
        """Blocks that hold no state, or a checkpoint that is not in use."""
        return self._pool.free_counts()[self._pool_number]

    def add_drafts(self, row: int, num_drafts: int) -> np.ndarray:
        """[num_drafts] int32; free blocks for the states before the drafts of a row."""
        blocks = self._pool.take(num_drafts, self._pool_number)
        self._before_drafts[row] = blocks
        return blocks

    def end_drafts(self, row: int, num_tokens: int, is_kept: bool) -> None:
        """A step with drafts is done: the row has computed `num_tokens` tokens, the newest before the drafts included.

        Args:
            is_kept: the state at its newest full block is to be kept, if the step has come to one.
        """
        blocks, border = self._before_drafts.pop(row), num_tokens // self._block_size * self._block_size
        first = int(self._position[row]) - len(blocks)  # tokens after which the state of the first block is
        assert num_tokens >= first, "the newest token before the drafts is computed"
        states = [*blocks.tolist(), int(self._own[row])]
        own = states.pop(num_tokens - first)
        self._own[row], self._position[row] = own, num_tokens
        if row in self._being_read:  # until the step is done, which it is
            self._being_read[row] = [(min(end, num_tokens), block_id) for end, block_id in self._being_read[row]]
        if is_kept and border == num_tokens:
            self.keep(*(np.array([one]) for one in (row, border, True)))
        elif is_kept and border >= first:
            kept = states.pop(border - first)
            self._due.setdefault(row, []).append((border // self._block_size - 1, kept, True))
            self._being_read.setdefault(row, []).append((num_tokens, kept))  # until it is published
        self._pool.free(np.array(states, dtype=np.int32))

    def keep(self, rows: np.ndarray, num_tokens: np.ndarray, is_decoding: np.ndarray) -> None:
        """The states that a step of these rows leaves, which are those after `num_tokens` tokens, are to be kept."""
        self._is_kept[rows] = True
        numbers = num_tokens // self._block_size - 1
        for row, *due in zip(*(one.tolist() for one in (rows, numbers, self._own[rows], is_decoding)), strict=True):
            self._due.setdefault(row, []).append((due[0], due[1], due[2]))

    def publish(self, filled: FilledBlocks) -> None:
        """Make kept states findable whose steps are done, in place of those that rows have kept while they decoded."""
        if not self._due:
            return
        nodes, block_ids, before = list[int](), list[int](), list[tuple[int, int]]()
        for row, number, node in zip(filled.rows.tolist(), filled.blocks.tolist(), filled.nodes, strict=True):
            due = self._due.get(row)
            if due is None or due[0][0] != number:
                continue
            _, block_id, is_decoding = due.pop(0)
            if not due:
                del self._due[row]
            nodes.append(node)
            block_ids.append(block_id)
            if is_decoding:
                before.append(self._newest.get(row, (ROOT, 0)))
                self._newest[row] = node, block_id
        self._index.publish(self._group, nodes, np.array(block_ids, dtype=np.int32))
        self._pool.drop(np.array([one for node, one in before if self._blocks.get(node) == one], dtype=np.int32))

    def free_out_of_window(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Free the blocks that steps of these rows have read."""
        if not self._being_read:
            return
        done: list[int] = []
        for row, num_tokens in zip(rows.tolist(), num_computed_tokens.tolist(), strict=True):
            entries = self._being_read.get(row)
            if entries is None:
                continue
            done += [block_id for end, block_id in entries if end <= num_tokens]
            self._being_read[row] = [one for one in entries if one[0] > num_tokens]
            if not self._being_read[row]:
                del self._being_read[row]
        if done:
            self._pool.free_of_many(np.array(done, dtype=np.int32))

    def free_beyond(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """As `RowBlocks`: blocks stay; what they hold cannot be taken back to fewer tokens."""

    def longest_hit(self, nodes: Sequence[int], max_blocks: int) -> int:
        """As `RowBlocks`: up to the last checkpoint."""
        blocks = self._blocks
        while max_blocks and nodes[max_blocks - 1] not in blocks:
            max_blocks -= 1
        return max_blocks

    def cached_block_ids(self, nodes: Sequence[int], num_blocks: int) -> np.ndarray:
        """As `RowBlocks`: the checkpoint at the end of the prefix."""
        return np.array([self._blocks[nodes[num_blocks - 1]]], dtype=np.int32) if num_blocks else NO_IDS

    def blocks_to_store(self, row: int, nodes: Sequence[int]) -> np.ndarray:
        """As `RowBlocks`: the checkpoints."""
        return np.array([self._blocks.get(node, NULL_BLOCK_ID) for node in nodes], dtype=np.int32)

    def note_loaded(self, row: int, num_blocks: int) -> None:
        """As `RowBlocks`: the state that the row reads first is a checkpoint."""
        self._due[row] = [(num_blocks - 1, int(self._source[row]), False)]

    def free(self, row: int) -> None:
        """As `RowBlocks`."""
        block_ids = [block_id for _, block_id in self._being_read.pop(row, [])]
        block_ids += [int(one[row]) for one in (self._source, self._own) if one[row]]
        block_ids += self._before_drafts.pop(row, NO_IDS).tolist()
        self._pool.free(np.array(block_ids, dtype=np.int32))
        self._own[row] = self._source[row] = self._position[row] = 0
        self._is_kept[row] = False
        self._due.pop(row, None)
        self._newest.pop(row, None)
