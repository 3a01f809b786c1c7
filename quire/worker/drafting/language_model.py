"""DraftLanguageModel: a second, smaller language model of the same vocabulary drafts, token by token.

Called by the draft step after sampling. Its layers have blocks of their own from the target's manager. Source:
Leviathan et al. 2023, section 2.

Example: a row has 5 tokens, the model has computed the first 3 of them; 3 drafts are wanted:

    pass 1: tokens 3 and 4 -> draft 5 (what was missing is filled in the same pass)
    pass 2: draft 5 -> draft 6
    pass 3: draft 6 -> draft 7, whose keys and values are not needed yet
"""

from __future__ import annotations

import numpy as np
import torch

from quire.core.scheduler_output import SchedulerOutput
from quire.worker.device.draft_chains import DraftChains
from quire.worker.drafting.chain import Chains, ragged_tokens, share_budget
from quire.worker.drafting.choice import DraftChoice
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.pages import DraftPages
from quire.worker.drafting.passes import DraftPasses, make_batch
from quire.worker.group_drafts import GroupDrafts


class DraftLanguageModel:
    """Implements `DraftModel`.

    Args:
        max_model_len: longest sequence of the model, in tokens: there are no drafts beyond it.
        max_fill_tokens: of missing tokens, most that one call computes; a row with more missing waits for its drafts.
        least_chance: as of `Chains`.
        drafts_at_once: the passes behind the one that computes what is missing; None = each is a call.
    """

    reads_all_states = False

    def __init__(
        self,
        passes: DraftPasses | GroupDrafts,
        pages: DraftPages,
        choice: DraftChoice,
        device: torch.device,
        max_model_len: int,
        max_fill_tokens: int,
        least_chance: float = 0.0,
        drafts_at_once: DraftChains | None = None,
    ) -> None:
        self._passes = passes
        self._pages = pages
        self._choice = choice
        self._least_chance = least_chance
        self._drafts_at_once = drafts_at_once
        self._device = device
        self._max_model_len = max_model_len
        self._max_fill_tokens = max_fill_tokens

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: where the contents of blocks went."""
        self._pages.apply(scheduled)

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        num_tokens = inputs.num_tokens
        # The newest token's keys and each draft's but the last one's are written: so far there must be blocks.
        longest = np.minimum(inputs.num_slots, self._max_model_len)
        most = np.where(num_tokens > longest, 0, np.minimum(inputs.max_tokens, longest - num_tokens + 1))
        chains = Chains(most, self._least_chance)
        asked = np.flatnonzero(most > 0)
        if len(asked):
            ready, hidden = self._fill(inputs, asked)
            if len(ready):
                if not self._draft_at_once(inputs, ready, hidden, chains):
                    self._draft(inputs, ready, hidden, chains)
                num_written = np.maximum(chains.counts[ready] - 1, 0)
                self._pages.note_drafts(inputs.rows[ready], chains.token_ids[ready], num_written)
        return chains.drafts()

    def _fill(self, inputs: DraftInputs, asked: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Compute what is missing of some rows; those that miss nothing then, and their hidden states at the end."""
        rows, num_tokens = inputs.rows[asked], inputs.num_tokens[asked]
        self._pages.keep_right_drafts(rows, num_tokens, inputs.token_ids)
        starts = np.minimum(self._pages.num_filled[rows], num_tokens - 1)
        counts = share_budget(num_tokens - starts, self._max_fill_tokens)
        chosen = np.flatnonzero(counts)
        asked, rows, starts, counts = asked[chosen], rows[chosen], starts[chosen], counts[chosen]
        token_ids = ragged_tokens(inputs.token_ids, rows, starts, counts)
        batch = make_batch(rows, starts, counts, token_ids, self._device)
        hidden = self._passes.forward(batch)
        self._pages.note(batch.token_rows, batch.token_positions)
        is_ready = starts + counts == inputs.num_tokens[asked]
        ends = torch.from_numpy(batch.logits_indices[is_ready]).to(hidden.device)
        return asked[is_ready], hidden if len(ends) == len(hidden) else hidden.index_select(0, ends)

    def _draft_at_once(self, inputs: DraftInputs, ready: np.ndarray, hidden: torch.Tensor, chains: Chains) -> bool:
        """As `_draft`, by one call; False = it cannot be."""
        if self._drafts_at_once is None:
            return False
        rows, positions = inputs.rows[ready], inputs.num_tokens[ready]
        found = self._drafts_at_once.run(hidden, rows, positions, chains.most[ready], self._least_chance)
        if found is None:
            return False
        chains.extend_all(ready, *found)
        return True

    def _draft(self, inputs: DraftInputs, ready: np.ndarray, hidden: torch.Tensor, chains: Chains) -> None:
        """Draft for rows whose tokens are all computed; `hidden` is [num_ready, hidden_size]."""
        active, compute_logits = ready, self._passes.compute_logits
        self._choice.begin(inputs.rows[ready], inputs.num_tokens[ready])
        while True:
            active = chains.extend(active, *self._choice.choose(compute_logits, hidden, inputs.rows[active]))
            if not len(active):
                break
            rows, tokens = inputs.rows[active], chains.newest(active)
            positions = inputs.num_tokens[active] + chains.counts[active] - 1
            ones = np.ones(len(active), dtype=np.int32)
            hidden = self._passes.forward(make_batch(rows, positions, ones, tokens, self._device))
