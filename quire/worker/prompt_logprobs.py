"""Log-probabilities of prompt tokens, over the chunks in which the prompt is computed. Called by the sampling step."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.logprobs import LogprobsArrays
from quire.models.interfaces import CausalLM
from quire.sample.ops.interface import SamplingOps
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates

# Logits of one run of positions, in bytes; a chunk of 2048 tokens would need 1 GiB at 128k tokens of vocabulary.
MAX_LOGITS_BYTES = 32 << 20


def compute_prompt_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    batch: InputBatch,
    requests: RequestStates,
    vocab_size: int,
    logprobs_mode: str,
    ops: SamplingOps,
) -> dict[int, LogprobsArrays]:
    """Row -> lines for the prompt tokens that this step's hidden states predict.

    The hidden state at position p predicts token p + 1, so lines are indexed from 1 and the last token of the prompt
    predicts no prompt token. A position that is computed again after a preemption is returned again.

    Args:
        hidden: [num_tokens, hidden_size].
        ops: of the device that `hidden` is on.
    """
    found: dict[int, LogprobsArrays] = {}
    for i in np.flatnonzero(requests.num_prompt_logprobs[batch.rows] >= 0).tolist():
        row, start = int(batch.rows[i]), int(batch.num_computed_tokens[i])
        num_lines = min(int(batch.seq_lens[i]), int(requests.num_prompt_tokens[row]) - 1) - start
        if num_lines > 0:
            first_token = int(batch.query_start_loc[i])
            predicted = np.arange(start + 1, start + 1 + num_lines)
            found[row] = _lines_of_run(
                model,
                hidden[first_token : first_token + num_lines],
                requests.token_ids[row, predicted],
                predicted,
                int(requests.num_prompt_logprobs[row]),
                max(1, MAX_LOGITS_BYTES // (4 * vocab_size)),
                logprobs_mode,
                ops,
            )
    return found


def _lines_of_run(
    model: CausalLM,
    hidden: torch.Tensor,
    targets: np.ndarray,
    predicted: np.ndarray,
    num_top: int,
    max_lines: int,
    logprobs_mode: str,
    ops: SamplingOps,
) -> LogprobsArrays:
    """Lines for consecutive positions of one request, at most `max_lines` at a time."""
    parts = []
    for start in range(0, len(targets), max_lines):
        part = slice(start, start + max_lines)
        logits = model.compute_logits(hidden[part])
        counts = np.full(len(targets[part]), num_top)
        parts.append(ops.gather_logprobs(logits, targets[part], counts, predicted[part], logprobs_mode))
    return LogprobsArrays(
        index=np.concatenate([part.index for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )
