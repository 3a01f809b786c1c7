"""Which drafts stand: those that are the token that is sampled in their place, up to the first that is not.

Called by the sampling step when some row has drafts. No state. What is before a draft is taken in before the token in
its place is sampled: penalties, bad words, processors see what they see without drafts, and draws depend on (seed,
position). So a row's tokens are the same bytes whatever is drafted.

    drafts 5 8 3, sampled 5 -> right; sampled 8 -> right; sampled 6 -> the draft 3 was wrong: the row gets 5 8 6

Nearly always nothing follows a row's tokens: its line of logits, seed and position say which token is sampled. Then all
its lines are sampled at once. Other rows are sampled position by position while a draft was right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.sample.sampler import SamplerOutput
from quire.worker.input_batch import InputBatch

Choose = Callable[[np.ndarray, np.ndarray, np.ndarray], SamplerOutput]
"""Samples a token from each of some rows of logits: their numbers, rows and positions, each [n]."""
TakeIn = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Appends tokens: rows, positions and token ids, each [n]."""


_NONE = np.empty(0, dtype=np.int32)


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


class Part(NamedTuple):
    """Tokens that were sampled together; `entries` [n] are the places of their rows in the batch."""

    entries: np.ndarray
    sampled: SamplerOutput
    rows: np.ndarray
    positions: np.ndarray


def verify_drafts(
    batch: InputBatch,
    drafts: np.ndarray,
    choose: Choose,
    take_in: TakeIn,
    closed: np.ndarray | None = None,
    follows: np.ndarray | None = None,
) -> Verified:
    """Sample the rows of `batch` up to the first draft that is wrong, that position included.

    Args:
        drafts: [num_logits] int32; the draft in the place of the token that each row of logits gives.
        closed: rows of logits that no row of the batch goes on to, even if the draft before is right; none is a row's
            first.
        follows: [num_sampling] bool; rows whose tokens depend on what was taken in before. None = all.
    """
    if follows is None:
        parts = _in_turns(batch, drafts, choose, take_in, closed, np.arange(len(batch.sampling_rows)))
    elif not np.count_nonzero(follows):
        parts = [_all_at_once(batch, drafts, choose, take_in, closed)]
    else:
        parts = _in_turns(batch, drafts, choose, take_in, closed, np.flatnonzero(follows))
        if not follows.all():
            parts.append(_at_once(batch, drafts, choose, take_in, closed, np.flatnonzero(~follows)))
    return merged(parts, len(batch.sampling_rows))


def _at_once(
    batch: InputBatch,
    drafts: np.ndarray,
    choose: Choose,
    take_in: TakeIn,
    closed: np.ndarray | None,
    entries: np.ndarray,
) -> Part:
    """All rows of logits of these entries are sampled; what is behind a wrong draft is dropped."""
    assert batch.logits_start_loc is not None, "called where some row has drafts"
    starts, counts = batch.logits_start_loc[entries], np.diff(batch.logits_start_loc)[entries]
    ends = np.cumsum(counts)
    turns = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    lines, flat = turns + np.repeat(starts, counts), np.repeat(entries, counts)
    rows, positions = batch.sampling_rows[flat], batch.sampling_positions[flat] + turns
    sampled = choose(lines, rows, positions)
    is_last = (sampled.token_ids != drafts[lines]) | sampled.is_invalid
    if closed is not None and len(closed):
        is_last |= np.isin(lines + 1, closed)
    kept = _up_to_last(is_last.tolist(), ends.tolist())
    if len(kept) < len(flat):
        rows, positions, flat, sampled = rows[kept], positions[kept], flat[kept], _select(sampled, np.array(kept))
    take_in(rows, positions, sampled.token_ids)
    return Part(flat, sampled, rows, positions)


def _all_at_once(
    batch: InputBatch, drafts: np.ndarray, choose: Choose, take_in: TakeIn, closed: np.ndarray | None
) -> Part:
    """`_at_once` for every row of the batch."""
    assert batch.logits_start_loc is not None, "called where some row has drafts"
    starts, num_lines = batch.logits_start_loc, len(drafts)
    lines = np.arange(num_lines)
    if len(starts) == 2:  # one row
        flat = np.zeros(num_lines, dtype=np.intp)
        rows, positions = batch.sampling_rows.repeat(num_lines), batch.sampling_positions + lines
    else:
        counts = starts[1:] - starts[:-1]
        flat = np.arange(len(counts)).repeat(counts)
        rows = batch.sampling_rows[flat]
        positions = lines + (batch.sampling_positions - starts[:-1])[flat]
    sampled = choose(lines, rows, positions)
    is_last = (sampled.token_ids != drafts) | sampled.is_invalid
    if closed is not None and len(closed):
        is_last |= np.isin(lines + 1, closed)
    kept = _up_to_last(is_last.tolist(), starts[1:].tolist())
    if len(kept) < num_lines:
        at = np.array(kept)
        rows, positions, flat, sampled = rows[at], positions[at], flat[at], _select(sampled, at)
    take_in(rows, positions, sampled.token_ids)
    return Part(flat, sampled, rows, positions)


def _up_to_last(is_last: list[bool], ends: list[int]) -> list[int]:
    """Of lines one entry after the other, each up to one of `ends`: those up to each entry's first last one."""
    kept, start = list[int](), 0
    for end in ends:
        stop = start
        while stop < end - 1 and not is_last[stop]:
            stop += 1
        kept.extend(range(start, stop + 1))
        start = end
    return kept


def _select(sampled: SamplerOutput, kept: np.ndarray) -> SamplerOutput:
    logprobs = sampled.logprobs
    if logprobs is not None:
        is_kept = np.zeros(len(sampled.token_ids), dtype=np.bool_)
        is_kept[kept] = True
        logprobs = logprobs.select(is_kept)
    return SamplerOutput(sampled.token_ids[kept], logprobs, sampled.is_invalid[kept])


def _in_turns(
    batch: InputBatch,
    drafts: np.ndarray,
    choose: Choose,
    take_in: TakeIn,
    closed: np.ndarray | None,
    entries: np.ndarray,
) -> list[Part]:
    """The first row of logits of each of these entries, then the second of those whose draft was right, ..."""
    assert batch.logits_start_loc is not None, "called where some row has drafts"
    starts, num_logits = batch.logits_start_loc[:-1], np.diff(batch.logits_start_loc)
    parts, turn = list[Part](), 0
    while len(entries):
        lines = starts[entries] + turn
        rows, positions = batch.sampling_rows[entries], batch.sampling_positions[entries] + turn
        sampled = choose(lines, rows, positions)
        take_in(rows, positions, sampled.token_ids)
        parts.append(Part(entries, sampled, rows, positions))
        turn += 1
        is_right = (num_logits[entries] > turn) & (sampled.token_ids == drafts[lines]) & ~sampled.is_invalid
        entries = entries[is_right]
        if closed is not None:
            entries = entries[~np.isin(starts[entries] + turn, closed)]
    return parts


def merged(parts: list[Part], num_entries: int) -> Verified:
    """The tokens of all parts, in the order of the batch."""
    joined = _joined(parts) if len(parts) > 1 else parts[0]
    sampled, bad = joined.sampled, joined.sampled.is_invalid
    if num_entries == 1:
        start_loc = np.array([0, len(joined.entries)], dtype=np.int32)
    else:
        start_loc = np.zeros(num_entries + 1, dtype=np.int32)
        np.cumsum(np.bincount(joined.entries, minlength=num_entries), out=start_loc[1:])
    if not np.count_nonzero(bad):
        return Verified(sampled.token_ids, start_loc, sampled.logprobs, _NONE, _NONE)
    return Verified(sampled.token_ids, start_loc, sampled.logprobs, joined.rows[bad], joined.positions[bad])


def _joined(parts: list[Part]) -> Part:
    """One part: row by row, of each row the tokens in the order of the parts."""
    entries, rows, positions, token_ids, is_invalid = (
        np.concatenate(arrays)
        for arrays in zip(
            *((p.entries, p.rows, p.positions, p.sampled.token_ids, p.sampled.is_invalid) for p in parts), strict=True
        )
    )
    order = np.argsort(entries, kind="stable")
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    logprobs = _joined_logprobs([part.sampled for part in parts], places)
    sampled = SamplerOutput(token_ids[order], logprobs, is_invalid[order])
    return Part(entries[order], sampled, rows[order], positions[order])


def _joined_logprobs(parts: list[SamplerOutput], places: np.ndarray) -> LogprobsArrays | None:
    """The lines of all parts; entry i of them, part after part, is entry places[i] of the result."""
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
