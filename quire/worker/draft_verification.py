"""Which drafts stand: rows with several rows of logits are sampled position by position while a draft was right.

Called by the sampling step when some row has drafts. No state. A draft stands when it is the token that is sampled in
its place, with everything before it taken in: penalties, bad words, processors see what they see without drafts, and
draws depend on (seed, position). So a row's tokens are the same bytes whatever is drafted.

    drafts 5 8 3, sampled 5 -> right; sampled 8 -> right; sampled 6 -> the draft 3 was wrong: the row gets 5 8 6
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.sample.sampler import SamplerOutput
from quire.worker.input_batch import InputBatch


class Verified(NamedTuple):
    """Tokens of a step's rows.

    Attributes:
        token_ids: [num_sampled] int32; of one row after the other.
        start_loc: [num_sampling + 1] int32; where each row's begin.
        logprobs: `index` refers to entries of `token_ids`.
        rows, positions: [num_invalid] those whose last token means nothing.
    """

    token_ids: np.ndarray
    start_loc: np.ndarray
    logprobs: LogprobsArrays | None
    rows: np.ndarray
    positions: np.ndarray


def verify_drafts(
    batch: InputBatch,
    drafts: np.ndarray,
    sample: Callable[[np.ndarray, np.ndarray, np.ndarray], SamplerOutput],
    closed: np.ndarray | None = None,
) -> Verified:
    """Sample the rows of `batch` up to the first draft that is wrong, that position included.

    Args:
        drafts: [num_logits] int32; the draft in the place of the token that each row of logits gives.
        sample: chooses and takes in a token for some rows of logits: their numbers, rows and positions, each [n].
        closed: rows of logits that no row of the batch goes on to, even if the draft before is right; none is a row's
            first.
    """
    assert batch.logits_start_loc is not None, "called where some row has drafts"
    starts, num_logits = batch.logits_start_loc[:-1], np.diff(batch.logits_start_loc)
    entries, turn = np.arange(len(starts)), 0
    parts: list[tuple[np.ndarray, SamplerOutput]] = []
    invalid: list[tuple[np.ndarray, np.ndarray]] = []
    while len(entries):
        lines = starts[entries] + turn
        rows, positions = batch.sampling_rows[entries], batch.sampling_positions[entries] + turn
        sampled = copy.deepcopy(sample(lines, rows, positions))  # the next turn may write there again
        parts.append((entries, sampled))
        invalid.append((rows[sampled.is_invalid], positions[sampled.is_invalid]))
        turn += 1
        is_right = (num_logits[entries] > turn) & (sampled.token_ids == drafts[lines]) & ~sampled.is_invalid
        entries = entries[is_right]
        if closed is not None:
            entries = entries[~np.isin(starts[entries] + turn, closed)]
    flat_entries = np.concatenate([part for part, _ in parts])
    order = np.argsort(flat_entries, kind="stable")  # by row, then by turn
    start_loc = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(np.bincount(flat_entries, minlength=len(starts)), out=start_loc[1:])
    token_ids = np.concatenate([sampled.token_ids for _, sampled in parts])[order]
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    bad_rows, bad_positions = (np.concatenate(arrays) for arrays in zip(*invalid, strict=True))
    return Verified(token_ids, start_loc, _merged([one for _, one in parts], places), bad_rows, bad_positions)


def _merged(parts: list[SamplerOutput], places: np.ndarray) -> LogprobsArrays | None:
    """The lines of all turns; entry i of them, turn after turn, is entry places[i] of the result."""
    found, first = [], 0
    for part in parts:
        if part.logprobs is not None:
            found.append((places[first + part.logprobs.index], part.logprobs))
        first += len(part.token_ids)
    if not found:
        return None
    index = np.concatenate([at for at, _ in found])
    order, width = np.argsort(index), max(lines.token_ids.shape[1] for _, lines in found)

    def joined(arrays: list[np.ndarray], padding: float) -> np.ndarray:
        padded = [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=padding) for one in arrays]
        return np.concatenate(padded)[order]

    return LogprobsArrays(
        index=index[order],
        token_ids=joined([lines.token_ids for _, lines in found], -1),
        logprobs=joined([lines.logprobs for _, lines in found], np.nan),
        ranks=joined([lines.ranks for _, lines in found], 0),
    )
