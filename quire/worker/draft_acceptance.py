"""DraftAcceptance: rules other than the default one by which drafts stand, for engines that are configured so.

Made by the worker, called by the sampling step in the place of sampled verification (`draft_verification`). Owns what
drafts were drawn from, where they are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.config.speculative import SpeculativeConfig
from quire.sample.drawn_drafts import DrawnDrafts
from quire.sample.ops.interface import SamplingOps
from quire.sample.ragged import take_lines
from quire.sample.rejection_sampler import AcceptanceRule, DraftedLines, RejectionSampler, TypicalAcceptance
from quire.sample.sampler import Sampler, SamplerOutput
from quire.sample.states import SamplingStates
from quire.worker.block_verification import BlockVerification, DraftedRows
from quire.worker.draft_verification import Verified, verify_drafts
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """How drafts stand.

    Attributes:
        rule: of single drafts.
        is_block: rejection sampling judges the drafts of a row together.
        num_drawn_drafts: most drafts of a row whose drafter draws them; 0 = none does.
    """

    rule: AcceptanceRule
    is_block: bool = False
    num_drawn_drafts: int = 0

    def __post_init__(self) -> None:
        assert not self.is_block or isinstance(self.rule, RejectionSampler), "blocks are a way of rejection sampling"


def acceptance_options(config: SpeculativeConfig | None) -> AcceptanceOptions | None:
    """What is configured; None = a draft stands when it is the token that is sampled."""
    if config is None or config.is_off or config.acceptance == "sampled":
        return None
    if config.acceptance == "typical":
        return AcceptanceOptions(TypicalAcceptance(config.posterior_threshold, config.posterior_alpha))
    num_drawn = config.num_tokens if config.draws_drafts else 0
    return AcceptanceOptions(RejectionSampler(), config.rejection_sample_method == "block", num_drawn)


class DraftAcceptance:
    """Verifies the drafts of steps.

    Args:
        ops: of the device that the logits are on.

    Attributes:
        drawn: draws drafts, for the proposer; None = it does not draw.
    """

    def __init__(
        self,
        options: AcceptanceOptions,
        requests: RequestStates,
        states: SamplingStates,
        ops: SamplingOps,
        logprobs_mode: str,
        device: torch.device,
    ) -> None:
        self._requests = requests
        self._states = states
        self._sampler = Sampler(states, ops, logprobs_mode, options.rule)
        self._blocks = BlockVerification(self._sampler, states, requests) if options.is_block else None
        self.drawn = None
        if options.num_drawn_drafts:
            self.drawn = DrawnDrafts(states, options.num_drawn_drafts, device, is_block=options.is_block)

    def forget(self, rows: np.ndarray) -> None:
        """The requests on these rows are gone."""
        if self.drawn is not None:
            self.drawn.forget(rows)

    def concerns(self, batch: InputBatch) -> bool:
        """Whether some row has drafts, or had some drawn that were all left out."""
        if batch.logits_start_loc is not None:
            return True
        return self.drawn is not None and bool(
            self.drawn.is_waiting(batch.sampling_rows, batch.sampling_positions).any()
        )

    def verify(
        self, batch: InputBatch, logits: torch.Tensor, drafts: np.ndarray, closed: np.ndarray | None = None
    ) -> Verified:
        """Sample the rows of `batch`.

        Args:
            logits: [num_logits, vocab_size], masked.
            drafts: [num_logits] int32; the draft in the place of the token that each row of logits gives.
            closed: as `verify_drafts`.
        """
        drafted = self._drafted(batch, drafts)
        if self._blocks is not None:
            assert batch.logits_start_loc is not None, "as for verify_drafts"
            start_loc = batch.logits_start_loc
            if closed is not None and len(closed):
                lines, start_loc = _open_lines(start_loc, closed)
                logits, drafted = take_lines(logits, lines), drafted.take(lines)
            rows = DraftedRows(start_loc, batch.sampling_rows, batch.sampling_positions, drafted)
            return self._blocks.verify(logits, rows)

        def choose(lines: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> SamplerOutput:
            return self._sampler.sample(take_lines(logits, lines), rows, positions, drafted.take(lines))

        def take_in(rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
            self._requests.append(rows, positions, token_ids)
            self._states.append(rows, token_ids)

        return verify_drafts(batch, drafts, choose, take_in, closed)

    def _drafted(self, batch: InputBatch, drafts: np.ndarray) -> DraftedLines:
        """Where drafts come from; behind those of a row none, or the first that was drawn and left out."""
        assert batch.logits_start_loc is not None, "as for verify_drafts"
        starts, counts = batch.logits_start_loc[:-1], np.diff(batch.logits_start_loc)
        token_ids = drafts.astype(np.int32)
        token_ids[batch.logits_start_loc[1:] - 1] = -1
        num_before = np.arange(len(drafts)) - np.repeat(starts, counts)
        if self.drawn is None:
            no_probs = torch.empty(0, self._states.vocab_size)
            return DraftedLines(token_ids, num_before, np.empty(0, dtype=np.int64), no_probs)
        rows = batch.sampling_rows
        is_drawn = self.drawn.is_waiting(rows, batch.sampling_positions)
        if batch.is_own_draft is not None:
            is_drawn &= batch.is_own_draft
        return self.drawn.of_lines(token_ids, np.repeat(rows, counts), num_before, np.repeat(is_drawn, counts))


def _open_lines(start_loc: np.ndarray, closed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lines of each row before its first closed one: their numbers, and where each row's begin then."""
    is_closed = np.zeros(start_loc[-1], dtype=np.int64)
    is_closed[closed] = 1
    num_closed = np.append(0, np.cumsum(is_closed))  # before each line
    counts = np.diff(start_loc)
    lines = np.flatnonzero(num_closed[1:] == np.repeat(num_closed[start_loc[:-1]], counts))
    is_open = np.zeros(start_loc[-1] + 1, dtype=np.int64)
    is_open[lines + 1] = 1
    new_start_loc: np.ndarray = np.cumsum(is_open)[start_loc].astype(np.int32)
    return lines, new_start_loc
