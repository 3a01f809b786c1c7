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

import numpy as np
import torch

from quire.core.scheduler_output import SchedulerOutput
from quire.models.aux_states import AuxStates
from quire.models.heads.feature_head import FeatureHead
from quire.worker.device.draft_chains import DraftChains
from quire.worker.drafting.chain import Chains, ragged_tokens
from quire.worker.drafting.choice import DraftChoice
from quire.worker.drafting.feature_passes import FeaturePasses
from quire.worker.drafting.feature_trees import FeatureTrees
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.pages import DraftPages


class FeatureDrafts:
    """Implements `DraftModel`.

    Args:
        max_model_len: positions that the head has, in tokens.
        aux: where the target leaves the states that features are made from; None = they are its hidden states.
        least_chance: as of `Chains`.
        drafts_at_once: the head's passes behind the one that computes this step's tokens; None = each is a call.
        trees: what a few rows draft instead of chains, which then are no longer than the trees; None = chains.
    """

    reads_all_states = True

    def __init__(
        self,
        head: FeatureHead,
        passes: FeaturePasses,
        pages: DraftPages,
        choice: DraftChoice,
        max_model_len: int,
        aux: AuxStates | None = None,
        least_chance: float = 0.0,
        drafts_at_once: DraftChains | None = None,
        trees: FeatureTrees | None = None,
    ) -> None:
        self._passes = passes
        self._pages = pages
        self._choice = choice
        self._target_ids = head.target_ids if head.has_own_vocabulary else None
        self._least_chance = least_chance
        self._drafts_at_once = drafts_at_once
        self._trees = trees
        self._max_model_len = max_model_len
        self._aux = aux

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: where the contents of blocks went."""
        self._pages.apply(scheduled)
        for request in scheduled.new_reqs:
            self._passes.forget(request.row)

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        # Pairs end one token before the newest; those of all drafts but the last are written.
        longest = np.minimum(inputs.num_slots, self._max_model_len)
        most = np.maximum(np.minimum(inputs.max_tokens, longest - inputs.num_tokens + 2), 0)
        if self._trees is not None:
            most = np.minimum(most, self._trees.depth)
        chains = Chains(most, self._least_chance)
        if not len(inputs.rows):
            return chains.drafts()
        features = self._fill(inputs)
        known = np.flatnonzero(most > 0)
        if len(known) < len(features):
            features = features.index_select(0, self._passes.index(known))
        if self._trees is not None and 0 < len(known) <= self._trees.max_rows:
            return self._trees.propose(inputs, known, features, most)
        if len(known) and not self._draft_at_once(inputs, known, features, chains):
            self._draft(inputs, known, features, chains)
        return chains.drafts()

    def _draft_at_once(self, inputs: DraftInputs, known: np.ndarray, features: torch.Tensor, chains: Chains) -> bool:
        """Draft for these rows by one call; False = it cannot be."""
        rows = inputs.rows[known]
        if self._drafts_at_once is None or not self._passes.are_whole(rows):
            return False
        positions = inputs.num_tokens[known] - 1
        found = self._drafts_at_once.run(features, rows, positions, chains.most[known], self._least_chance)
        if found is None:
            return False
        chains.extend_all(known, *found)
        return True

    def _draft(self, inputs: DraftInputs, known: np.ndarray, features: torch.Tensor, chains: Chains) -> None:
        """Draft for these rows pass by pass; `features` is [num_known, hidden_size]."""
        self._choice.begin(inputs.rows[known], inputs.num_tokens[known])
        while len(known):
            chosen = self._choice.choose(self._passes.compute_logits, features, inputs.rows[known], self._target_ids)
            active = chains.extend(known, *chosen)
            if not len(active):
                break
            if len(active) < len(known):
                features = features.index_select(0, self._passes.index(np.searchsorted(known, active)))
            positions = inputs.num_tokens[active] + chains.counts[active] - 2
            features = self._passes.forward(
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
        found = self._passes.forward(rows, starts, counts, token_ids, self._states(inputs, lines), are_states=True)
        flat_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        self._pages.note(flat_rows, positions, self._passes.are_in_place(flat_rows))
        return found.index_select(0, self._passes.index(ends - 1))

    def _begin_behind_gaps(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Rows whose context does not reach up to `starts` ([n] positions) begin anew there."""
        has_gap = self._pages.num_filled[rows] < starts
        self._passes.begin_anew(rows[has_gap], starts[has_gap])

    def _states(self, inputs: DraftInputs, lines: np.ndarray) -> torch.Tensor:
        """What features are made from, of some lines of `hidden`: [num_lines, hidden_size], or of several layers."""
        if self._aux is None:
            return inputs.hidden.index_select(0, self._passes.index(lines))
        index = self._passes.index(lines if inputs.step_lines is None else inputs.step_lines[lines])
        return torch.cat([states.index_select(0, index) for states in self._aux.tensors], 1)
