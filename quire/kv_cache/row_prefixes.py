"""RowPrefixes: how far the tokens of each row are in the prefix tree, the same for all KV cache groups.

Called by the coordinator: a step fills blocks, the rows advance by as many nodes, and each group publishes its blocks
under these nodes. Owns the node of each row, of which the row is a user.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.request import ExtraKeys, Request
from quire.kv_cache.block_hash import bytes_by_block
from quire.kv_cache.prefix_tree import ROOT, PrefixTree

_NEVER = np.iinfo(np.int32).max
"""As a number of published blocks: none is to be published."""

_MAX_ROWS_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class FilledBlocks:
    """Blocks that have become full and computed; those of a row come in order.

    Attributes:
        rows, blocks: [num_pages] whose each is, and its number there.
        nodes: [num_pages] the prefix that ends with each.
    """

    rows: np.ndarray
    blocks: np.ndarray
    nodes: list[int]


class RowPrefixes:
    """The row's first `_num_published` blocks are the prefix `_nodes[row]`."""

    def __init__(self, tree: PrefixTree, max_num_seqs: int, block_size: int) -> None:
        self._tree = tree
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self._nodes = [ROOT] * max_num_seqs
        self._num_published = np.full(max_num_seqs, _NEVER, dtype=np.int32)
        self._requests: list[Request | None] = [None] * max_num_seqs

    def start(self, row: int, request: Request, node: int | None, num_blocks: int) -> None:
        """A request got an empty row that begins with a prefix of `num_blocks` blocks.

        Args:
            node: the prefix; None = it is not in the tree, so that none of the row's blocks is published.
        """
        self._requests[row] = request
        if node is None or request.message.sampling_params.no_store:
            return
        self._tree.hold(node)
        self._nodes[row] = node
        self._num_published[row] = num_blocks

    def request_on(self, row: int) -> Request:
        """The request of a row in use."""
        request = self._requests[row]
        assert request is not None, "a row that computes tokens belongs to a request"
        return request

    def publishes(self, row: int) -> bool:
        """Whether full blocks of a row are made findable."""
        return bool(self._num_published[row] != _NEVER)

    def end(self, row: int) -> None:
        """A row is given up."""
        self._tree.release(self._nodes[row])
        self._nodes[row] = ROOT
        self._num_published[row] = _NEVER
        self._requests[row] = None

    def reached(self, row: int, num_blocks: int) -> tuple[int | None, int]:
        """The prefix of as many of the row's first `num_blocks` blocks as are published; None = the row publishes none.

        Returns:
            Its node, and its number of blocks.
        """
        num_published = int(self._num_published[row])
        if num_published == _NEVER:
            return None, 0
        node = self._nodes[row]
        for _ in range(num_published - num_blocks):
            node = self._tree.parent(node)
        return node, min(num_published, num_blocks)

    def nodes_of(self, row: int, num_blocks: int) -> list[int]:
        """The prefixes that end with each of a row's first `num_blocks` blocks, as far as they are published."""
        node, num_reached = self.reached(row, num_blocks)
        nodes: list[int] = []
        while node is not None and len(nodes) < num_reached:
            nodes.append(node)
            node = self._tree.parent(node)
        return nodes[::-1]

    def advance(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> FilledBlocks | None:
        """Bring rows to the ends of the blocks that a step has filled; None = it filled none.

        In a decode step of many rows this loop is the largest part of the scheduler's time.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        num_full = num_computed_tokens // self._block_size
        num_due = num_full - self._num_published[rows]
        due = np.flatnonzero(num_due > 0)
        if not len(due):
            return None
        rows = rows[due]
        flat_rows, blocks = spread(rows, self._num_published[rows], num_due[due])
        first_tokens = flat_rows * token_ids.shape[1] + blocks * self._block_size
        block_tokens = token_ids.reshape(-1).take(first_tokens[:, None] + self._offsets)
        nodes, tree, requests = self._nodes, self._tree, self._requests
        reached = []
        for row, block, tokens in zip(flat_rows.tolist(), blocks.tolist(), bytes_by_block(block_tokens), strict=True):
            request = requests[row]
            assert request is not None, "a row that computed tokens belongs to a request"
            extra_keys = request.extra_keys
            node = tree.advance(nodes[row], tokens, extra_keys.get(block, ()) if extra_keys else ())
            nodes[row] = node
            reached.append(node)
            if request.message.template_id:
                tree.template_ids.setdefault(node, request.message.template_id)
        self._num_published[rows] = num_full[due]
        return FilledBlocks(flat_rows, blocks, reached)

    def is_computing(self, node: int, block: int, tokens: bytes, extra_keys: ExtraKeys) -> bool:
        """Whether a row is about to fill and publish block number `block`, of this content, after a prefix."""
        rows = np.flatnonzero(self._num_published == block)[:_MAX_ROWS_LOOKED_AT].tolist()
        nodes, requests = self._nodes, self._requests
        for row in rows:
            request = requests[row] if nodes[row] == node else None
            if request is None or block >= len(request.block_tokens) or request.block_tokens[block] != tokens:
                continue
            if request.extra_keys.get(block, ()) == extra_keys:
                return True
        return False


def spread(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in a table: starts[0], starts[0] + 1, ... of rows[0] (counts[0] of them), then those of rows[1], ...

    Returns:
        Rows and columns; the arguments themselves where there is one place in each row, as in most steps.
    """
    ends = np.cumsum(counts)
    if ends[-1] == len(rows):  # every count is at least 1
        return rows, starts
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(starts, counts) + within
