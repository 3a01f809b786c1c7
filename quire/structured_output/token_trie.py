"""The vocabulary's bytes as a tree, for libraries that know characters and no tokens. Read only once it is made."""

from __future__ import annotations

from array import array
from typing import Protocol

from quire.structured_output.interface import Vocabulary


class State(Protocol):
    """Where a text stands, byte by byte."""

    def next_bytes(self) -> frozenset[int]:
        """The bytes that may follow."""

    def after(self, byte: int) -> State:
        """The state behind one of them; this one stays as it is."""


class TokenTrie:
    """Nodes in the order of a walk, so that the part under a node is a range that can be jumped over.

    Args:
        vocabulary: whose tokens without bytes are left out.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        order = sorted((piece, token_id) for token_id, piece in enumerate(vocabulary.pieces) if piece)
        self.token_ids = array("i", (token_id for _, token_id in order))
        self._byte, self._end = array("B"), array("i")
        self._first, self._last = array("i"), array("i")
        open_nodes: list[int] = []
        for index, (piece, _) in enumerate(order):
            shared = self._num_shared(open_nodes, piece)
            self._close(open_nodes, shared)
            for byte in piece[shared:]:
                open_nodes.append(len(self._byte))
                self._byte.append(byte)
                self._end.append(0)
                self._first.append(index)
                self._last.append(index)
            self._last[open_nodes[-1]] = index + 1
        self._close(open_nodes, 0)

    def allowed(self, place: State, first_bytes: frozenset[int] | None = None) -> list[int]:
        """Ids of the tokens all of whose bytes may follow `place`.

        Args:
            first_bytes: only tokens that begin with one of these.
        """
        found: list[int] = []
        byte_of, end_of, first, last = self._byte, self._end, self._first, self._last
        stack: list[tuple[int, int, State, frozenset[int] | None]] = [(0, len(byte_of), place, first_bytes)]
        while stack:
            node, end, at, only = stack.pop()
            if node == end:
                continue
            bytes_here = at.next_bytes() if only is None else at.next_bytes() & only
            while node < end:
                if byte_of[node] in bytes_here:
                    found.extend(self.token_ids[first[node] : last[node]])
                    stack.append((node + 1, end_of[node], at.after(byte_of[node]), None))
                node = end_of[node]
        return found

    def _num_shared(self, open_nodes: list[int], piece: bytes) -> int:
        """How many bytes `piece` has in common with the path to the last node."""
        shared = 0
        for node, byte in zip(open_nodes, piece, strict=False):
            if self._byte[node] != byte:
                break
            shared += 1
        return shared

    def _close(self, open_nodes: list[int], depth: int) -> None:
        while len(open_nodes) > depth:
            self._end[open_nodes.pop()] = len(self._byte)
