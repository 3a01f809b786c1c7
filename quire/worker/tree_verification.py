"""Which drafts of trees stand: rows go from token to token, along the children that are the tokens sampled.

Called by the sampling step where a batch has trees. No state. As for chains (`draft_verification`), everything before a
token is taken in before it is sampled, and draws depend on (seed, position): a row's tokens are the same bytes whatever
is drafted.
"""

from __future__ import annotations

import numpy as np

from quire.worker.draft_verification import Choose, Part, TakeIn, Verified, merged
from quire.worker.input_batch import InputBatch, TreeBatch


def verify_trees(
    batch: InputBatch, trees: TreeBatch, choose: Choose, take_in: TakeIn, closed: np.ndarray | None = None
) -> tuple[Verified, np.ndarray]:
    """Sample the rows of `batch` up to the first token that no draft behind the accepted ones is, that one included.

    Args:
        choose, take_in, closed: as `verify_drafts`.

    Returns:
        (the tokens, [num_sampled] intp: the step's token whose logits gave each).
    """
    assert batch.logits_start_loc is not None, "called where some row has drafts"
    next_lines = _Children(trees)
    entries, lines = np.arange(len(batch.sampling_rows)), batch.logits_start_loc[:-1].astype(np.intp)
    parts, passed, turn = list[Part](), list[np.ndarray](), 0
    while len(entries):
        rows, positions = batch.sampling_rows[entries], batch.sampling_positions[entries] + turn
        sampled = choose(lines, rows, positions)
        take_in(rows, positions, sampled.token_ids)
        parts.append(Part(entries, sampled, rows, positions))
        passed.append(lines)
        lines = np.where(sampled.is_invalid, -1, next_lines.of(lines, sampled.token_ids))
        if closed is not None:
            lines = np.where(np.isin(lines, closed), -1, lines)
        entries, lines = entries[lines >= 0], lines[lines >= 0]
        turn += 1
    order = np.argsort(np.concatenate([part.entries for part in parts]), kind="stable")
    return merged(parts, len(batch.sampling_rows)), trees.line_tokens[np.concatenate(passed)[order]]


class _Children:
    """Finds drafts by their parents and token ids."""

    def __init__(self, trees: TreeBatch) -> None:
        children = np.flatnonzero(trees.line_parents >= 0)
        keys = (trees.line_parents[children] << 32) + trees.line_token_ids[children]
        order = np.argsort(keys, kind="stable")
        self._keys = np.append(keys[order], np.iinfo(np.int64).max)
        self._lines = np.append(children[order], -1)

    def of(self, lines: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """[n] intp: the row of logits of the child with this token, of each of [n] lines; -1 = it has none."""
        wanted = (lines.astype(np.int64) << 32) + token_ids
        at = np.searchsorted(self._keys, wanted)
        found: np.ndarray = np.where(self._keys[at] == wanted, self._lines[at], -1)
        return found
