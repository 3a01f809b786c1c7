"""FeatureDrafts: a head on the target's hidden states drafts, token by token (EAGLE-1 and -3, heads that ship).

Called by the draft step after sampling. The head's one layer has blocks of its own from the target's manager: slot p
holds the keys and values of the feature of token p beside the embedding of token p + 1. Features exist in the step
that computes a token and never again, so a row that was not asked in some steps, or whose prompt was found in the
prefix cache, has a gap: the head then begins anew behind it, with the tokens since as its context. Where that is not
at the beginning of a block, its slots are shifted to one, so that the cache has no hole.

Example: a row has 41 tokens, blocks of 16, and was not asked for a while; this step computed tokens 38 and 39:

    slots 32 and 33 (shift 6, first slot 32): the pairs of tokens 38 and 39 -> draft 41
    slot 34: draft 41 beside its estimated feature -> draft 42
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata
from quire.core.scheduler_output import SchedulerOutput
from quire.models.aux_states import AuxStates
from quire.models.heads.feature_head import FeatureHead
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.draft_chains import DraftChains
from quire.worker.drafting.chain import Chains, ragged_tokens
from quire.worker.drafting.choice import ComputeLogits, DraftChoice
from quire.worker.drafting.head_graphs import HeadGraphs
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.pages import DraftPages
from quire.worker.drafting.passes import make_batch
from quire.worker.group_drafts import GroupDrafts
from quire.worker.group_steps import PlacedTables


class FeatureDrafts:
    """Implements `DraftModel`.

    Args:
        attention: of the head's layer alone.
        max_model_len: positions that the head has, in tokens.
        aux: where the target leaves the states that features are made from; None = they are its hidden states.
        graphs: of the head; None = it runs call by call.
        group: the other ranks that compute the head, in the place of graphs; None = there are none.
        least_chance: as of `Chains`.
        drafts_at_once: the head's passes behind the one that computes this step's tokens; None = each is a call.
    """

    reads_all_states = True

    def __init__(
        self,
        head: FeatureHead,
        attention: AttentionGroups,
        block_tables: BlockTables,
        pages: DraftPages,
        choice: DraftChoice,
        device: torch.device,
        max_model_len: int,
        aux: AuxStates | None = None,
        graphs: HeadGraphs | None = None,
        group: GroupDrafts | None = None,
        least_chance: float = 0.0,
        drafts_at_once: DraftChains | None = None,
    ) -> None:
        self._head = head
        self._group = group
        self._compute_logits: ComputeLogits = head.compute_logits if group is None else group.compute_logits
        self._attention = attention
        self._block_tables = block_tables
        self._pages = pages
        self._choice = choice
        self._least_chance = least_chance
        self._drafts_at_once = drafts_at_once
        self._device = device
        self._max_model_len = max_model_len
        self._aux = aux
        self._graphs = graphs
        max_num_seqs = len(block_tables.tables[0])
        self._block_size = block_tables.block_sizes[min(attention.groups)]
        self._first_slots = np.zeros(max_num_seqs, dtype=np.int32)
        self._shifts = np.zeros(max_num_seqs, dtype=np.int32)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: where the contents of blocks went."""
        self._pages.apply(scheduled)
        for request in scheduled.new_reqs:
            self._first_slots[request.row] = self._shifts[request.row] = 0

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        # Pairs end one token before the newest; those of all drafts but the last are written.
        longest = np.minimum(inputs.num_slots, self._max_model_len)
        most = np.maximum(np.minimum(inputs.max_tokens, longest - inputs.num_tokens + 2), 0)
        chains = Chains(most, self._least_chance)
        if not len(inputs.rows):
            return chains.drafts()
        features = self._fill(inputs)
        known = np.flatnonzero(most > 0)
        if len(known) < len(features):
            features = features.index_select(0, self._index(known))
        if len(known) and not self._draft_at_once(inputs, known, features, chains):
            self._draft(inputs, known, features, chains)
        return chains.drafts()

    def _draft_at_once(self, inputs: DraftInputs, known: np.ndarray, features: torch.Tensor, chains: Chains) -> bool:
        """Draft for these rows by one call; False = it cannot be."""
        rows = inputs.rows[known]
        if self._drafts_at_once is None or self._first_slots[rows].any() or self._shifts[rows].any():
            return False
        positions = inputs.num_tokens[known] - 1
        found = self._drafts_at_once.run(features, rows, positions, chains.most[known], self._least_chance)
        if found is None:
            return False
        chains.extend_all(known, *found)
        return True

    def _draft(self, inputs: DraftInputs, known: np.ndarray, features: torch.Tensor, chains: Chains) -> None:
        """Draft for these rows pass by pass; `features` is [num_known, hidden_size]."""
        target_ids = self._head.target_ids if self._head.has_own_vocabulary else None
        self._choice.begin(inputs.rows[known], inputs.num_tokens[known])
        while len(known):
            chosen = self._choice.choose(self._compute_logits, features, inputs.rows[known], target_ids)
            active = chains.extend(known, *chosen)
            if not len(active):
                break
            if len(active) < len(known):
                features = features.index_select(0, self._index(np.searchsorted(known, active)))
            positions = inputs.num_tokens[active] + chains.counts[active] - 2
            features = self._forward(
                inputs.rows[active], positions, np.ones_like(positions), chains.newest(active), features
            )
            known = active

    def _fill(self, inputs: DraftInputs) -> torch.Tensor:
        """Compute the pairs of this step; [n, hidden_size] the feature of each row's newest token."""
        rows, counts = inputs.rows, inputs.hidden_counts
        starts = inputs.num_tokens - 1 - counts
        self._begin_behind_gaps(rows, starts)
        token_ids = ragged_tokens(inputs.token_ids, rows, starts + 1, counts)
        ends = np.cumsum(counts)
        lines = np.arange(ends[-1]) + np.repeat(inputs.hidden_ends - ends, counts)
        found = self._forward(rows, starts, counts, token_ids, self._states(inputs, lines), are_states=True)
        flat_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        self._pages.note(flat_rows, positions, self._shifts[flat_rows] == 0)
        return found.index_select(0, self._index(ends - 1))

    def _begin_behind_gaps(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Rows whose context does not reach up to `starts` ([n] positions) begin anew there."""
        has_gap = self._pages.num_filled[rows] < starts
        anew, at = rows[has_gap], starts[has_gap]
        self._shifts[anew] = at % self._block_size
        self._first_slots[anew] = at - at % self._block_size

    def _states(self, inputs: DraftInputs, lines: np.ndarray) -> torch.Tensor:
        """What features are made from, of some lines of the step: [num_lines, hidden_size], or of several layers."""
        index = self._index(lines)
        if self._aux is None:
            return inputs.hidden.index_select(0, index)
        return torch.cat([states.index_select(0, index) for states in self._aux.tensors], 1)

    def _forward(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, features: torch.Tensor,
        *, are_states: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The head on `counts` pairs of each row from position `starts` on; valid until the next pass.

        Args:
            are_states: `features` are the states that they are made from.
        """
        batch = make_batch(rows, starts, counts, token_ids, self._device)
        if are_states and self._group is None:
            features = self._head.features(features)
        shifts, first_slots = self._shifts[rows], self._first_slots[rows]
        if self._graphs is not None and not first_slots.any() and not shifts.any():
            captured = self._graphs.run(batch, features)
            if captured is not None:
                return captured
        seq_lens = (batch.seq_lens - shifts - first_slots).astype(np.int32)
        slots = batch.token_positions - np.repeat(shifts, counts)
        placed: dict[int, PlacedTables] = {}
        for group in self._attention.groups:
            table = self._block_tables.tables[group]
            columns = first_slots[:, None] // self._block_size + np.arange(-(-int(seq_lens.max()) // self._block_size))
            blocks = table[rows[:, None], np.minimum(columns, table.shape[1] - 1)]
            placed[group] = (blocks, self._block_tables.slots(group, batch.token_rows, slots))
        if self._group is not None:
            batch = dataclasses.replace(batch, seq_lens=seq_lens)
            return self._group.forward(batch, features, are_states=are_states, placed=placed)
        metadata = {
            group: AttentionMetadata(
                num_reqs=len(rows),
                num_tokens=batch.num_tokens,
                query_start_loc=torch.from_numpy(batch.query_start_loc).to(self._device),
                seq_lens=torch.from_numpy(seq_lens).to(self._device),
                block_table=torch.from_numpy(blocks).to(self._device),
                slot_mapping=torch.from_numpy(slot_ids).to(self._device),
                query_start_loc_np=batch.query_start_loc,
                seq_lens_np=seq_lens,
                max_query_len=int(counts.max()),
                max_seq_len=int(seq_lens.max()),
            )
            for group, (blocks, slot_ids) in placed.items()
        }
        found: torch.Tensor = self._head(
            batch.input_ids, features, batch.positions, self._attention.context_of(metadata)
        )
        return found

    def _index(self, lines: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(lines, dtype=np.int64)).to(self._device)
