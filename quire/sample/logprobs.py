"""Log-probabilities of sampled or prompt tokens and of the likeliest ones, with ranks, by torch on any device.

Pure functions, called by `TorchSamplingOps` and, for tokens that requests name, by the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from quire.core.logprobs import LogprobsArrays
from quire.sample.ragged import line_blocks, to_device

_LOW_31_BITS = 0x7FFFFFFF
_LOW_32_BITS = 0xFFFFFFFF


def gather_logprobs(
    scores: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray, index: np.ndarray
) -> LogprobsArrays:
    """One line per row of `scores`: the given token, then the row's `num_top` likeliest.

    Args:
        scores: [n, vocab_size] float32; log-probabilities, or logits when these are wanted instead.
        token_ids: [n] integers; column 0 of the result.
        num_top: [n] integers in [0, vocab_size].
        index: [n] integers; which entry of the step each line belongs to.

    Returns:
        Lines of width 1 + max(num_top). Column 0 ranks by the number of tokens with at least its score; the top
        tokens rank 1, 2, ... in the order of falling score, ties by rising id.
    """
    width = int(num_top.max(initial=0))
    chosen = to_device(token_ids.astype(np.int64), scores.device)[:, None]
    ids = torch.cat((chosen, likeliest(scores, width)), dim=1)
    values = scores.gather(1, ids)
    ids_np, values_np = ids.cpu().numpy().astype(np.int32), values.cpu().numpy()
    ranks = np.broadcast_to(np.arange(width + 1, dtype=np.int32), ids_np.shape).copy()
    ranks[:, 0] = (scores >= values[:, :1]).sum(dim=1).cpu().numpy()
    is_padding = np.arange(width + 1) > num_top[:, None]
    ids_np[is_padding], values_np[is_padding], ranks[is_padding] = -1, np.nan, 0
    return LogprobsArrays(index=index.astype(np.int32), token_ids=ids_np, logprobs=values_np, ranks=ranks)


def with_named_tokens(lines: LogprobsArrays, logits: torch.Tensor, named: Mapping[int, np.ndarray]) -> LogprobsArrays:
    """`lines` with the tokens that some of them name, after the sampled one and without ranks.

    Ranks would need a pass over the vocabulary for each name. The score of a named token is its logit, shifted as
    far as that of the sampled token is from its own: by nothing, or by the logarithm of the sum.

    Args:
        lines: with the sampled token in column 0.
        logits: [n, vocab_size]; what the lines are of.
        named: line -> [k] int32 ids; at least one line.
    """
    places, width = np.fromiter(named, dtype=np.int64), max(map(len, named.values()))
    ids = np.array([np.pad(one, (0, width - len(one)), constant_values=-1) for one in named.values()])
    own = lines.token_ids[places, :1]
    picked = np.concatenate((own, np.maximum(ids, 0)), axis=1).astype(np.int64)
    found = logits[to_device(places, logits.device)[:, None], to_device(picked, logits.device)].cpu().numpy()
    ids[ids == own] = -1  # it is there already
    scores = found[:, 1:] + (lines.logprobs[places, :1] - found[:, :1])
    missing = ((0, 0), (0, max(0, 1 + width - lines.token_ids.shape[1])))
    wide = LogprobsArrays(
        lines.index,
        np.pad(lines.token_ids, missing, constant_values=-1),
        np.pad(lines.logprobs, missing, constant_values=np.nan),
        np.pad(lines.ranks, missing),
    )
    wide.token_ids[places, 1 : 1 + width] = ids
    wide.logprobs[places, 1 : 1 + width] = np.where(ids < 0, np.nan, scores)
    return wide


def likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[n, count] int64: ids of the largest of [n, vocab_size] float32 `scores`, falling; ties by rising id.

    Scores and ids are packed into integers that sort in that order and never tie, so the first ids do not depend
    on how many are asked for.
    """
    if count == 0 or not len(scores):
        return torch.empty((len(scores), count), dtype=torch.int64, device=scores.device)
    return torch.cat([_likeliest(block, count) for block in line_blocks(scores)])


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & _LOW_31_BITS)  # integers in the order of the floats
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | (_LOW_32_BITS - ids)
    return _LOW_32_BITS - (keys.topk(count, dim=1).values & _LOW_32_BITS)


def scores_of(logits: torch.Tensor, logprobs_mode: str) -> torch.Tensor:
    """What the log-probability fields hold for float32 `logits`: their log-softmax, or themselves (`*_logits`)."""
    return logits if logprobs_mode.endswith("_logits") else torch.log_softmax(logits, dim=-1)
