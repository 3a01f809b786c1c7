"""Steps with trees of drafts: which tokens are computed where, and in which blocks each path of a tree lies.

Called by `prepare_inputs`, `AttentionGroups` and the model runner. No state. A path must be summed as plain decoding
sums it: over keys at contiguous positions, in the same tiles. A mask of ancestors would leave gaps between a query's
keys. So each segment of a tree (see `core.draft_trees`) is a request of its own to the attention backend, of
consecutive tokens, with the row's blocks before the tree and, unless it is the row's first, scratch blocks for the
tail. Into these the keys and values of the tail's earlier tokens, its ancestors among them, are copied in every layer,
once they are written. What is accepted outside the row's own blocks is copied there when it is known.

    newest token n at position 20, drafts a b c, and d behind a; blocks of 16

    segment   tokens    positions      blocks          copied into the scratch block
    first     n a b c   20 21 22 23    own, own        -
    second    d         22             own, scratch    the tokens at positions 16 to 20, and a
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from quire.core.draft_trees import depths
from quire.core.scheduler_output import DraftTokens
from quire.worker.input_batch import InputBatch, TreeBatch


@dataclass(frozen=True, slots=True)
class TreeBlocks:
    """Where the segments of a step lie, in one KV cache group.

    Attributes:
        table: [num_segments, num_blocks] int32.
        slots: [num_tokens] int64; where each token's keys and values are written.
        copied_slots: [2, num_copies] int64; from and to: what is copied once they are. None = nothing is.
    """

    table: np.ndarray
    slots: np.ndarray
    copied_slots: np.ndarray | None


def make_tree_batch(
    rows: np.ndarray,
    query_start_loc: np.ndarray,
    num_computed_tokens: np.ndarray,
    is_sampling: np.ndarray,
    drafts: DraftTokens,
    step: int,
) -> tuple[TreeBatch, np.ndarray]:
    """The segments of a step, and the position of each of its tokens, [num_tokens] int64.

    Args:
        rows, num_computed_tokens, is_sampling: [num_reqs].
        query_start_loc: [num_reqs + 1].
        drafts: with parents, depth-first; the last tokens of their requests.
        step: its number.
    """
    assert drafts.parents is not None, "called for trees"
    num_tokens, counts = int(query_start_loc[-1]), np.diff(query_start_loc)
    request_of_token = np.repeat(np.arange(len(rows)), counts)
    ends = query_start_loc[1:].astype(np.int64)
    newest = ends - drafts.counts - 1  # the token behind which drafts stand
    request_of_draft = np.repeat(np.arange(len(rows)), drafts.counts)
    first_of_row = np.cumsum(drafts.counts) - drafts.counts
    at = np.arange(len(request_of_draft)) + (newest + 1 - first_of_row)[request_of_draft]

    parents = np.arange(-1, num_tokens - 1, dtype=np.int64)
    parents[query_start_loc[:-1]] = -1
    parents[at] = newest[request_of_draft] + 1 + drafts.parents
    depth = depths(np.where(drafts.parents < 0, -1, first_of_row[request_of_draft] + drafts.parents))
    positions = np.arange(num_tokens, dtype=np.int64) + (num_computed_tokens - query_start_loc[:-1])[request_of_token]
    bases = num_computed_tokens + newest - query_start_loc[:-1]
    positions[at] = bases[request_of_draft] + depth

    is_first_token = np.zeros(num_tokens, dtype=np.bool_)
    is_first_token[query_start_loc[:-1]] = True
    starts = np.flatnonzero(is_first_token | (parents != np.arange(-1, num_tokens - 1)))
    start_loc = np.append(starts, num_tokens).astype(np.int32)
    request = request_of_token[starts]

    num_logits = np.where(is_sampling, 1 + drafts.counts, 0)
    lines = np.flatnonzero(np.arange(num_tokens) >= (ends - num_logits)[request_of_token])
    line_of_token = np.full(num_tokens + 1, -1, dtype=np.int64)
    line_of_token[lines] = np.arange(len(lines))
    is_draft = np.zeros(num_tokens, dtype=np.bool_)
    is_draft[at] = True
    token_ids = np.full(num_tokens, -1, dtype=np.int32)
    token_ids[at] = drafts.token_ids
    return TreeBatch(
        parents=parents,
        draft_tokens=at,
        draft_token_ids=drafts.token_ids,
        line_tokens=lines,
        line_parents=np.where(is_draft[lines], line_of_token[parents[lines]], -1),
        line_token_ids=token_ids[lines],
        rows=rows[request],
        start_loc=start_loc,
        seq_lens=(positions[start_loc[1:] - 1] + 1).astype(np.int32),
        is_first=is_first_token[starts],
        bases=bases[request],
        step=step,
    ), positions


def place_segments(
    trees: TreeBatch, positions: np.ndarray, table: np.ndarray, block_size: int, scratch_ids: np.ndarray
) -> TreeBlocks:
    """Blocks and slots of the segments.

    Args:
        positions: [num_tokens] int64.
        table: [max_num_seqs, max_blocks_per_req] int32.
        scratch_ids: [num_scratch_blocks] integers; enough for all tails.
    """
    own = table[trees.rows, : -(-int(trees.seq_lens.max()) // block_size)]
    first = trees.bases // block_size
    sizes = np.where(trees.is_first, 0, (trees.seq_lens - 1) // block_size + 1 - first)
    if sizes.sum() > len(scratch_ids):
        raise ValueError(f"trees need {sizes.sum()} scratch blocks, there are {len(scratch_ids)}")
    placed, firsts = own.copy(), np.cumsum(sizes) - sizes
    for column in range(int(sizes.max(initial=0))):
        has = np.flatnonzero(sizes > column)
        placed[has, first[has] + column] = scratch_ids[firsts[has] + column]
    written = slots_in(placed, np.repeat(np.arange(len(sizes)), np.diff(trees.start_loc)), positions, block_size)

    extra = np.flatnonzero(~trees.is_first)
    starts, begin = trees.start_loc[:-1][extra], first[extra] * block_size
    lengths = positions[starts] - begin  # of the tail before the segment's own tokens
    segments, offsets = np.repeat(extra, lengths), np.cumsum(lengths) - lengths
    at = np.arange(len(segments)) + np.repeat(begin - offsets, lengths)
    sources = slots_in(own, segments, at, block_size)
    above = trees.parents[starts]
    alive = np.arange(len(extra))
    while len(alive):  # ancestors within the step are where they were written
        tokens = above[alive]
        sources[offsets[alive] + positions[tokens] - begin[alive]] = written[tokens]
        above[alive] = trees.parents[tokens]
        alive = alive[(above[alive] >= 0) & (positions[above[alive]] >= begin[alive])]
    return TreeBlocks(placed, written, np.stack([sources, slots_in(placed, segments, at, block_size)]))


def slots_in(blocks: np.ndarray, segments: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """[n] int64: where tokens at `positions` of `segments` (both [n]) lie, whose blocks are [num_segments, .]."""
    found: np.ndarray = blocks[segments, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return found


def along_paths(batch: InputBatch, kept: np.ndarray, sampled_start_loc: np.ndarray) -> tuple[InputBatch, np.ndarray]:
    """A step with trees as if only what was accepted of them had been computed: the batch, so far as models that draft
    look at it, and which of the step's tokens are left, [.] int64.

    Args:
        kept: [num_sampled] integers, rising; the step's tokens whose logits gave tokens.
        sampled_start_loc: as in `ModelRunnerOutput`.
    """
    assert batch.trees is not None, "called for trees"
    is_kept = np.ones(batch.num_tokens, dtype=np.bool_)
    is_kept[batch.trees.line_tokens] = False
    is_kept[kept] = True
    num_before = np.append(0, np.cumsum(is_kept))
    chains = dataclasses.replace(
        batch,
        query_start_loc=num_before[batch.query_start_loc].astype(np.int32),
        logits_start_loc=sampled_start_loc,
        trees=None,
    )
    return chains, np.flatnonzero(is_kept)
