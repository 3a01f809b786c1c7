"""PrefixTree: prefixes of whole blocks as nodes of a tree, found by the tokens themselves.

Owned by the prefix index. A node is a number; it stands for the prefix that ends with a certain block, is found by its
parent, the block's tokens and its extra keys, and lives for as long as it has users. Numbers are never used again.

Example, blocks of 2 tokens: after `tree.enter([b"ab", b"cd"], {}, 2) == 2` the tree has nodes 1 ("ab") and 2 ("abcd"),
`tree.walk([b"ab", b"xy"], {}, 2) == [1]`, and `tree.release(2)` removes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.core.request import ExtraKeys
from quire.kv_cache.block_hash import ROOT_HASH, BlockHashFn, sha256_block_hash
from quire.kv_cache.salted_siblings import SaltedSiblings
from quire.kv_cache.siblings import Siblings

ROOT = 0
"""The empty prefix, parent of every first block."""

NodeKey = tuple[Any, ...]
"""(parent, tokens of the block), followed by its extra keys where it has any. A plain tuple: one for every node."""


class PrefixTree:
    """Nodes with the number of their users: rows that have come to them, cached blocks, remembered misses, children.

    Args:
        hash_fn: names a block for other programs; nothing here is found by such names.

    Attributes:
        siblings: nodes by parent and extra keys.
        salted: extra keys by parent and tokens.
        template_ids: of nodes whose prompt was made by a chat template: its number.
    """

    def __init__(self, hash_fn: BlockHashFn = sha256_block_hash) -> None:
        self._hash_fn = hash_fn
        self._nodes: dict[NodeKey, int] = {}
        self._keys: dict[int, NodeKey] = {}
        self._num_users: dict[int, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._before_reset: dict[NodeKey, int] = {}
        self.template_ids: dict[int, int] = {}
        self.siblings = Siblings()
        self.salted = SaltedSiblings()
        self._last_node = ROOT

    def __len__(self) -> int:
        return len(self._nodes)

    def child(self, node: int, tokens: bytes, extra_keys: ExtraKeys = ()) -> int | None:
        """The prefix that continues `node` by a block of these tokens; None = there is no such node."""
        return self._nodes.get((node, tokens, extra_keys) if extra_keys else (node, tokens))

    def walk(self, blocks: Sequence[bytes], extra_keys: Mapping[int, ExtraKeys], max_blocks: int) -> list[int]:
        """The nodes on the way of a sequence, one per block, up to the first block that has none.

        Args:
            blocks: tokens of each block, at least `max_blocks` of them.
            extra_keys: block number -> its extra keys.
        """
        return _walk(self._nodes, blocks, extra_keys, max_blocks)

    def was_known_before_reset(
        self, blocks: Sequence[bytes], extra_keys: Mapping[int, ExtraKeys], num_blocks: int
    ) -> bool:
        """Whether there was a node for the first `num_blocks` blocks of a sequence when the tree was cleared last."""
        return len(_walk(self._before_reset, blocks, extra_keys, num_blocks)) == num_blocks

    def advance(self, node: int, tokens: bytes, extra_keys: ExtraKeys) -> int:
        """A user of `node` becomes one of the prefix that continues it by a block, which is made if need be."""
        key: NodeKey = (node, tokens, extra_keys) if extra_keys else (node, tokens)
        child = self._nodes.get(key)
        if child is None:
            self._last_node = child = self._last_node + 1
            self._nodes[key], self._keys[child], self._num_users[child] = child, key, 1
            self.siblings.add(child, node, extra_keys)
            if extra_keys:
                self.salted.add(node, tokens, extra_keys)
            return child  # which uses its parent in place of the caller
        self._num_users[child] += 1
        self.release(node)
        return child

    def enter(self, blocks: Sequence[bytes], extra_keys: Mapping[int, ExtraKeys], num_blocks: int) -> int:
        """Add a user to the prefix of the first `num_blocks` blocks of a sequence, which is made if need be."""
        node = ROOT
        for block in range(num_blocks):
            node = self.advance(node, blocks[block], extra_keys.get(block, ()))
        return node

    def hold(self, node: int) -> None:
        """Add a user to a node that has one."""
        if node != ROOT:
            self._num_users[node] += 1

    def release(self, node: int) -> None:
        """Take a user off a node; it goes when it has none left, and so may those before it."""
        while node != ROOT:
            self._num_users[node] -= 1
            if self._num_users[node]:
                return
            node = self._remove(node)

    def _remove(self, node: int) -> int:
        """Take a node without users out of the tree; its parent, which is left with one user too many."""
        del self._num_users[node]
        key = self._keys.pop(node)
        del self._nodes[key]
        parent: int = key[0]
        extra_keys: ExtraKeys = key[2] if len(key) > 2 else ()
        self.siblings.remove(node, parent, extra_keys)
        if extra_keys:
            self.salted.remove(parent, key[1], extra_keys)
        self.template_ids.pop(node, None)
        self._hashes.pop(node, None)
        return parent

    def parent(self, node: int) -> int:
        """The prefix without its last block."""
        parent: int = self._keys[node][0]
        return parent

    def num_users(self, node: int) -> int:
        """Rows, cached blocks, remembered misses and children that refer to it."""
        return self._num_users[node]

    def tokens(self, node: int) -> bytes:
        """Tokens of the last block."""
        tokens: bytes = self._keys[node][1]
        return tokens

    def tokens_of(self, nodes: Iterable[int]) -> list[bytes]:
        """Tokens of the last block of each."""
        keys = self._keys
        return [keys[node][1] for node in nodes]

    def extra_keys(self, node: int) -> ExtraKeys:
        """Extra keys of the last block."""
        key = self._keys[node]
        return key[2] if len(key) > 2 else ()

    def hash_of(self, node: int) -> bytes:
        """The name of the last block for other programs, which depends on content alone; computed when it is wanted."""
        unnamed = []
        while node != ROOT and node not in self._hashes:
            unnamed.append(node)
            node = self.parent(node)
        name = self._hashes[node] if node != ROOT else ROOT_HASH
        for one in reversed(unnamed):
            self._hashes[one] = name = self._hash_fn(name, self.tokens(one), self.extra_keys(one))
        return name

    def clear(self) -> None:
        """Remove all nodes, which nothing uses any longer; what was there is remembered until the next time."""
        self._before_reset, self._nodes = self._nodes, {}
        for by_node in (self._keys, self._num_users, self._hashes, self.template_ids):
            by_node.clear()
        self.siblings.clear()
        self.salted.clear()


def _walk(
    nodes: Mapping[NodeKey, int], blocks: Sequence[bytes], extra_keys: Mapping[int, ExtraKeys], max_blocks: int
) -> list[int]:
    found: list[int] = []
    if not nodes:
        return found
    get, node = nodes.get, ROOT
    for block in range(max_blocks):
        key = (node, blocks[block], extra_keys[block]) if block in extra_keys else (node, blocks[block])
        child = get(key)
        if child is None:
            break
        found.append(child)
        node = child
    return found
