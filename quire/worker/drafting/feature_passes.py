"""FeaturePasses: passes of a head on features over tokens of rows. Owns where each row's keys and values begin.

Made with `FeatureDrafts`. The head's one layer has blocks of its own from the target's manager: slot p holds the keys
and values of the feature of token p beside the embedding of token p + 1. A row that has a gap begins anew behind it,
with its slots shifted to the beginning of a block, so that the cache has no hole.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.models.heads.feature_head import FeatureHead
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.draft_trees import TreeBlocks
from quire.worker.drafting.choice import ComputeLogits
from quire.worker.drafting.head_graphs import HeadGraphs
from quire.worker.drafting.node_tails import NodeTails, place_nodes
from quire.worker.drafting.passes import make_batch
from quire.worker.group_drafts import GroupDrafts
from quire.worker.group_messages import TreeSegments


class FeaturePasses:
    """Computes the head.

    Args:
        attention: of the head's layer alone.
        graphs: of the head; None = it runs call by call.
        group: the other ranks that compute the head, in the place of graphs; None = there are none.

    Attributes:
        compute_logits: of features.
    """

    def __init__(
        self,
        head: FeatureHead,
        attention: AttentionGroups,
        block_tables: BlockTables,
        device: torch.device,
        graphs: HeadGraphs | None = None,
        group: GroupDrafts | None = None,
    ) -> None:
        self.compute_logits: ComputeLogits = head.compute_logits if group is None else group.compute_logits
        self._head = head
        self._attention = attention
        self._block_tables = block_tables
        self._device = device
        self._graphs = graphs
        self._group_drafts = group
        (self._group,) = attention.groups
        self._block_size = block_tables.block_sizes[self._group]
        max_num_seqs = len(block_tables.tables[0])
        self._first_slots = np.zeros(max_num_seqs, dtype=np.int32)
        self._shifts = np.zeros(max_num_seqs, dtype=np.int32)

    def forget(self, row: int) -> None:
        """Another request has the row."""
        self._first_slots[row] = self._shifts[row] = 0

    def begin_anew(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """These rows ([n]) have nothing before these positions ([n])."""
        self._shifts[rows] = starts % self._block_size
        self._first_slots[rows] = starts - starts % self._block_size

    def are_in_place(self, rows: np.ndarray) -> np.ndarray:
        """[n] bool; whether slots are positions."""
        found: np.ndarray = self._shifts[rows] == 0
        return found

    def are_whole(self, rows: np.ndarray) -> bool:
        """Whether all these rows have keys and values from position 0 on."""
        return not (self._first_slots[rows].any() or self._shifts[rows].any())

    def index(self, lines: np.ndarray) -> torch.Tensor:
        """[n] int64 on the device."""
        return torch.from_numpy(np.asarray(lines, dtype=np.int64)).to(self._device)

    def forward(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, features: torch.Tensor,
        *, are_states: bool = False, tails: NodeTails | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The head on `counts` pairs of each row from position `starts` on; valid until the next pass.

        Args:
            are_states: `features` are the states that they are made from.
            tails: the pairs are nodes of trees, one each, and rows may come several times; None = they are not.
        """
        batch = make_batch(rows, starts, counts, token_ids, self._device)
        if are_states and self._group_drafts is None:
            features = self._head.features(features)
        if self._graphs is not None and tails is None and self.are_whole(rows):
            captured = self._graphs.run(batch, features)
            if captured is not None:
                return captured
        offsets = self._shifts[rows] + self._first_slots[rows]
        seq_lens = (batch.seq_lens - offsets).astype(np.int32)
        blocks = self._blocks(rows, int(seq_lens.max()))
        if tails is None:
            slots = batch.token_positions - np.repeat(self._shifts[rows], counts)
            placed = TreeBlocks(blocks, self._block_tables.slots(self._group, batch.token_rows, slots), None)
        else:
            placed = place_nodes(tails, blocks, starts - offsets, tails.bases - offsets, self._block_size)
        if self._group_drafts is not None:
            batch = dataclasses.replace(batch, seq_lens=seq_lens)
            segments = None
            if placed.copied_slots is not None:
                segments = TreeSegments(batch.query_start_loc, seq_lens, placed.copied_slots)
            tables = {self._group: (placed.table, placed.slots)}
            return self._group_drafts.forward(batch, features, are_states=are_states, placed=tables, segments=segments)
        context = self._attention.placed_context(
            batch.num_tokens, batch.query_start_loc, seq_lens, placed, self._device
        )
        found: torch.Tensor = self._head(batch.input_ids, features, batch.positions, context)
        return found

    def _blocks(self, rows: np.ndarray, longest: int) -> np.ndarray:
        """[n, num_blocks] the rows' own blocks from where they begin, for so many tokens."""
        table = self._block_tables.tables[self._group]
        columns = self._first_slots[rows][:, None] // self._block_size + np.arange(-(-longest // self._block_size))
        found: np.ndarray = table[rows[:, None], np.minimum(columns, table.shape[1] - 1)]
        return found
