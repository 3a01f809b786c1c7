"""Which nodes of the prefix tree follow the same one: the newest first, by the extra keys they have.

Owned by the tree. Costs one entry for each node that has one after it, and two for each further one.
"""

from __future__ import annotations

from quire.core.request import ExtraKeys

_NONE = 0  # the root follows no node
_ParentKey = int | tuple[int, ExtraKeys]


class Siblings:
    """For each parent and extra keys a list of nodes, linked from the newest to the oldest."""

    def __init__(self) -> None:
        self._newest: dict[_ParentKey, int] = {}
        self._older: dict[int, int] = {}
        self._newer: dict[int, int] = {}
        self._extra_keys: dict[int, dict[ExtraKeys, None]] = {}

    def add(self, node: int, parent: int, extra_keys: ExtraKeys) -> None:
        """A node was made after `parent`."""
        key = (parent, extra_keys) if extra_keys else parent
        before = self._newest.setdefault(key, node)
        if before != node:
            self._newest[key] = self._newer[before] = node
            self._older[node] = before
        elif extra_keys:
            self._extra_keys.setdefault(parent, {})[extra_keys] = None

    def remove(self, node: int, parent: int, extra_keys: ExtraKeys) -> None:
        """A node that was added goes."""
        older, newer = self._older.pop(node, _NONE), self._newer.pop(node, _NONE)
        if older:
            _link(self._newer, older, newer)
        if newer:
            _link(self._older, newer, older)
            return
        key = (parent, extra_keys) if extra_keys else parent
        if older:
            self._newest[key] = older
            return
        del self._newest[key]
        if extra_keys:
            del self._extra_keys[parent][extra_keys]
            if not self._extra_keys[parent]:
                del self._extra_keys[parent]

    def after(self, parent: int, extra_keys: ExtraKeys = (), most: int | None = None) -> list[int]:
        """The nodes after `parent` that have these extra keys, the newest first, `most` at most."""
        node, older = self._newest.get((parent, extra_keys) if extra_keys else parent, _NONE), self._older
        nodes: list[int] = []
        while node and len(nodes) != most:
            nodes.append(node)
            node = older.get(node, _NONE)
        return nodes

    def all_after(self, parent: int, most: int | None = None) -> list[int]:
        """Every node after `parent`; of each extra keys `most` at most."""
        nodes = self.after(parent, most=most)
        for extra_keys in self._extra_keys.get(parent, ()):
            nodes += self.after(parent, extra_keys, most)
        return nodes

    def clear(self) -> None:
        """Remove all nodes."""
        self._extra_keys.clear()
        self._newest.clear()
        self._older.clear()
        self._newer.clear()


def _link(links: dict[int, int], node: int, target: int) -> None:
    if target:
        links[node] = target
    else:
        links.pop(node, None)
