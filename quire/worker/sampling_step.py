"""The second half of a step: from hidden states to sampled tokens, written back to the rows.

Called by the model runner. Holds references; the state is in `RequestStates` and `SamplingStates`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.logger import get_logger
from quire.models.interfaces import CausalLM
from quire.sample.ops.interface import SamplingOps
from quire.sample.ragged import take_lines
from quire.sample.sampler import Sampler, SamplerOutput
from quire.sample.states import SamplingStates
from quire.worker.draft_acceptance import DraftAcceptance
from quire.worker.draft_verification import verify_drafts
from quire.worker.input_batch import InputBatch
from quire.worker.prompt_logprobs import compute_prompt_logprobs
from quire.worker.request_states import RequestStates
from quire.worker.tree_verification import verify_trees

logger = get_logger(__name__)


class SamplingStep:
    """Logits for the rows that need them, a token for the rows that sample.

    Args:
        ops: of the device that the model is on.
        logprobs_mode: what log-probability fields hold.
        acceptance: a rule by which drafts stand; None = a draft stands when it is the token that is sampled.
        keep_paths: is called with a batch that has trees, and those of its tokens, rising, whose logits gave tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        requests: RequestStates,
        sampling: SamplingStates,
        ops: SamplingOps,
        logprobs_mode: str,
        acceptance: DraftAcceptance | None = None,
        keep_paths: Callable[[InputBatch, np.ndarray], None] | None = None,
    ) -> None:
        self._model = model
        self._requests = requests
        self._sampling = sampling
        self._ops = ops
        self._sampler = Sampler(sampling, ops, logprobs_mode)
        self._logprobs_mode = logprobs_mode
        self._acceptance = acceptance
        self._keep_paths = keep_paths

    def run(self, batch: InputBatch, hidden: torch.Tensor, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Sample the step whose hidden states are `hidden` [num_tokens, hidden_size]."""
        prompt_logprobs = compute_prompt_logprobs(
            self._model,
            hidden,
            batch,
            self._requests,
            self._sampling.vocab_size,
            self._logprobs_mode,
            self._ops,
        )
        rows, positions = batch.sampling_rows, batch.sampling_positions
        if batch.logits_start_loc is not None or (self._acceptance is not None and self._acceptance.concerns(batch)):
            return self._run_with_drafts(batch, hidden, grammar, prompt_logprobs)
        sampled = self._sample(batch, hidden, rows, positions, grammar)
        self._take_in(rows, positions, sampled.token_ids)
        return ModelRunnerOutput(
            rows=rows,
            sampled_token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=self._errors(rows[sampled.is_invalid], positions[sampled.is_invalid]),
        )

    def _run_with_drafts(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        grammar: GrammarBitmask | None,
        prompt_logprobs: dict[int, LogprobsArrays],
    ) -> ModelRunnerOutput:
        logits = self._logits(batch, hidden, grammar)
        if batch.logits_start_loc is None:
            batch = dataclasses.replace(batch, logits_start_loc=np.arange(len(logits) + 1, dtype=np.int32))

        def choose(lines: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> SamplerOutput:
            chosen = logits if len(lines) == len(logits) else take_lines(logits, lines)
            return self._sampler.sample(chosen, rows, positions)

        closed = None if grammar is None else grammar.closed
        if batch.trees is not None:
            verified, kept = verify_trees(batch, batch.trees, choose, self._take_in, closed)
            assert self._keep_paths is not None, "trees are for runners that keep paths"
            self._keep_paths(batch, kept)
        elif self._acceptance is None:
            follows = self._sampling.follows_tokens(batch.sampling_rows)
            verified = verify_drafts(batch, self._drafts_of(batch), choose, self._take_in, closed, follows)
        else:
            verified = self._acceptance.verify(batch, logits, self._drafts_of(batch), closed)
        return ModelRunnerOutput(
            rows=batch.sampling_rows,
            sampled_token_ids=verified.token_ids,
            sampled_start_loc=verified.start_loc,
            logprobs=verified.logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=self._errors(verified.rows, verified.positions),
        )

    def _take_in(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Tokens were sampled; several of a row only where nothing follows its tokens."""
        self._requests.append(rows, positions, token_ids)
        self._sampling.append(rows, token_ids)

    def _drafts_of(self, batch: InputBatch) -> np.ndarray:
        """[num_logits] int32: what stands where each row of logits gives a token; behind the last draft anything."""
        assert batch.logits_start_loc is not None, "called where some row has drafts"
        starts, tokens = batch.logits_start_loc, self._requests.token_ids
        if len(starts) == 2:  # one row
            first = int(batch.sampling_positions[0])
            of_row: np.ndarray = tokens[int(batch.sampling_rows[0]), first : first + int(starts[1])].copy()
            return of_row
        counts = starts[1:] - starts[:-1]
        positions = np.arange(starts[-1]) + np.repeat(batch.sampling_positions - starts[:-1], counts)
        drafts: np.ndarray = tokens[np.repeat(batch.sampling_rows, counts), positions]
        return drafts

    def _sample(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        grammar: GrammarBitmask | None,
    ) -> SamplerOutput:
        if not len(rows):
            return SamplerOutput(np.empty(0, dtype=np.int32), None, np.empty(0, dtype=np.bool_))
        return self._sampler.sample(self._logits(batch, hidden, grammar), rows, positions)

    def _logits(self, batch: InputBatch, hidden: torch.Tensor, grammar: GrammarBitmask | None) -> torch.Tensor:
        """[num_logits, vocab_size], masked, valid until the next step."""
        if len(batch.logits_indices) < batch.num_tokens:
            hidden = hidden[torch.from_numpy(batch.logits_indices).to(hidden.device)]
        logits = self._ops.compute_logits(self._model.compute_logits, hidden)
        return logits if grammar is None else self._ops.mask_by_grammar(logits, grammar)

    def _errors(self, rows: np.ndarray, positions: np.ndarray) -> dict[int, str]:
        """Row -> what went wrong, for tokens that mean nothing."""
        errors = {}
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            errors[row] = (
                f"no token can be sampled at position {position}: the logits are NaN or infinite, or the "
                "request's masks exclude all tokens"
            )
            logger.error("request %s: %s", self._requests.request_ids[row], errors[row])
        return errors
