"""PrefixIndex: which block of which group holds the end of which prefix. One index for groups of every kind.

Owned by the block pool. A prefix is a node of the tree, found by its tokens, so no hash has to be trusted; a group has
at most one cached block for it. Which of these blocks a request needs is the business of the group's manager: full
attention all of a prefix, a window the last ones.

Example: of a request of three blocks, the index of a model with a full group and a window of one block may hold
`blocks[0] == {1: 7, 2: 8, 3: 9}` and `blocks[1] == {3: 5}`: another that begins alike shares blocks 7, 8, 9 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from quire.core.cache_info import MissReason
from quire.core.request import ExtraKeys
from quire.kv_cache.block_hash import BlockHashFn, sha256_block_hash
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.eviction_history import EvictionHistory
from quire.kv_cache.prefix_tree import ROOT, PrefixTree


class PrefixIndex:
    """The cached blocks. Of blocks of equal content the first published is kept.

    Args:
        is_whole: per group: a block is of use with all blocks before it alone, so that it is forgotten with these.
        has_state: per group: its blocks are recurrent states; empty = none are.

    Attributes:
        is_cached: [num_blocks] bool; blocks that can be found. Read-only for others.
        blocks: per group: node -> its cached block. Read-only for others.
        tree: the prefixes.
        past: prefixes whose last block cannot be found (any longer), and why.
        past_states: the same of recurrent states.
    """

    def __init__(
        self,
        num_blocks: int,
        is_whole: Sequence[bool] = (True,),
        hash_fn: BlockHashFn = sha256_block_hash,
        has_state: Sequence[bool] = (),
    ) -> None:
        self.is_cached = np.zeros(num_blocks, dtype=np.bool_)
        self.blocks: tuple[dict[int, int], ...] = tuple({} for _ in is_whole)
        self.tree = PrefixTree(hash_fn)
        self.past = EvictionHistory(2 * num_blocks, self.tree)
        self.past_states = EvictionHistory(2 * num_blocks, self.tree)
        self._is_whole = tuple(is_whole)
        self._has_state = tuple(has_state) or (False,) * len(self._is_whole)
        self._node_of_block = [ROOT] * num_blocks
        self._group_of_block = [0] * num_blocks
        self._is_subscribed = False
        self._note_stored: Callable[[bytes, bytes | None, list[int], ExtraKeys], None] = _no_subscriber
        self._note_removed: Callable[[bytes], None] = _no_subscriber
        self._note_cleared: Callable[[], None] = _no_subscriber

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def publish(self, group: int, nodes: Sequence[int], block_ids: np.ndarray) -> None:
        """Make full, computed blocks findable, but for those of which an equal one already is, or that none would find.

        Args:
            nodes: [num_pages] the prefix that ends with each block; it has a user.
            block_ids: [num_pages] int32; blocks of `group`.
        """
        blocks, tree, is_whole = self.blocks[group], self.tree, self._is_whole[group]
        fresh = []
        for node, block_id in zip(nodes, block_ids.tolist(), strict=True):
            if node in blocks or (is_whole and (parent := tree.parent(node)) and parent not in blocks):
                continue
            blocks[node] = block_id
            tree.hold(node)
            self._node_of_block[block_id], self._group_of_block[block_id] = node, group
            fresh.append(block_id)
            if self._is_subscribed and not group:
                self._announce(node)
        self.is_cached[fresh] = True

    def _announce(self, node: int) -> None:
        tree = self.tree
        parent = tree.parent(node)
        parent_hash = None if parent == ROOT else tree.hash_of(parent)
        tokens = np.frombuffer(tree.tokens(node), dtype="<i4").tolist()
        self._note_stored(tree.hash_of(node), parent_hash, tokens, tree.extra_keys(node))

    def forget(self, block_ids: np.ndarray, *, is_evicted: bool = True) -> None:
        """Make these cached blocks, [num_blocks] int32, impossible to find, with those of no use without them.

        Args:
            is_evicted: they are needed for something else, which is remembered.
        """
        due, forgotten = block_ids.tolist(), []
        while due:
            block_id = due.pop()
            node, group = self._node_of_block[block_id], self._group_of_block[block_id]
            if node == ROOT:
                continue  # it went with the block before it
            forgotten.append(block_id)
            self._node_of_block[block_id] = ROOT
            blocks = self.blocks[group]
            del blocks[node]
            if self._is_subscribed and not group:
                self._note_removed(self.tree.hash_of(node))
            if self._is_whole[group]:
                due += [blocks[child] for child in self.tree.siblings.all_after(node) if child in blocks]
            if is_evicted and self._has_state[group]:
                self.past_states.note(node, MissReason.EVICTED)
            elif is_evicted and not group:
                self.past.note(node, MissReason.EVICTED)
            self.tree.release(node)
        self.is_cached[forgotten] = False

    def clear(self) -> None:
        """Make all blocks impossible to find; no row uses a prefix."""
        self.past.clear()
        self.past_states.clear()
        for blocks in self.blocks:
            blocks.clear()
        self.tree.clear()
        self._node_of_block[:] = [ROOT] * len(self._node_of_block)
        self.is_cached[:] = False
        self._note_cleared()

    def holds(self, node: int) -> bool:
        """Whether the last block of a prefix is cached in some group."""
        return any(node in blocks for blocks in self.blocks)

    def holding(self, nodes: Iterable[int]) -> list[int]:
        """Of these nodes those whose last block is cached in the first group."""
        blocks = self.blocks[0]
        return [node for node in nodes if node in blocks]

    def subscribe(self, recorder: KVEventRecorder) -> None:
        """Have `recorder` notified of every change in the first group, if it keeps whole sequences, from now on."""
        self._is_subscribed = self._is_whole[0]
        self._note_stored, self._note_removed = recorder.note_stored, recorder.note_removed
        self._note_cleared = recorder.note_cleared


def _no_subscriber(*_: Any) -> None:
    """Where changes go before there is a subscriber."""
