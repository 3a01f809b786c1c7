"""Which cached pages follow the same prefix: the newest first, by the extra keys they have.

Owned by the prefix index. Costs one entry for each prefix that has a page after it, and two for each further page.
"""

from __future__ import annotations

from quire.core.request import ExtraKeys

_NONE = 0  # the null page is never cached
_ParentKey = int | tuple[int, ExtraKeys]


class SiblingPages:
    """For each prefix id and extra keys a list of pages, linked from the newest to the oldest."""

    def __init__(self) -> None:
        self._newest: dict[_ParentKey, int] = {}
        self._older: dict[int, int] = {}
        self._newer: dict[int, int] = {}
        self._extra_keys: dict[int, dict[ExtraKeys, None]] = {}

    def add(self, block_id: int, parent_id: int, extra_keys: ExtraKeys) -> None:
        """A page was published after prefix `parent_id`."""
        key = (parent_id, extra_keys) if extra_keys else parent_id
        before = self._newest.setdefault(key, block_id)
        if before != block_id:
            self._newest[key] = self._newer[before] = block_id
            self._older[block_id] = before
        elif extra_keys:
            self._extra_keys.setdefault(parent_id, {})[extra_keys] = None

    def remove(self, block_id: int, parent_id: int, extra_keys: ExtraKeys) -> None:
        """A page that was added is forgotten."""
        older, newer = self._older.pop(block_id, _NONE), self._newer.pop(block_id, _NONE)
        if older:
            _link(self._newer, older, newer)
        if newer:
            _link(self._older, newer, older)
            return
        key = (parent_id, extra_keys) if extra_keys else parent_id
        if older:
            self._newest[key] = older
            return
        del self._newest[key]
        if extra_keys:
            del self._extra_keys[parent_id][extra_keys]
            if not self._extra_keys[parent_id]:
                del self._extra_keys[parent_id]

    def after(self, parent_id: int, extra_keys: ExtraKeys = (), most: int | None = None) -> list[int]:
        """The pages after a prefix that have these extra keys, the newest first, `most` at most."""
        block_id, older = self._newest.get((parent_id, extra_keys) if extra_keys else parent_id, _NONE), self._older
        block_ids: list[int] = []
        while block_id and len(block_ids) != most:
            block_ids.append(block_id)
            block_id = older.get(block_id, _NONE)
        return block_ids

    def all_after(self, parent_id: int) -> list[int]:
        """Every page after a prefix."""
        block_ids = self.after(parent_id)
        for extra_keys in self._extra_keys.get(parent_id, ()):
            block_ids += self.after(parent_id, extra_keys)
        return block_ids


def _link(links: dict[int, int], block_id: int, target: int) -> None:
    if target:
        links[block_id] = target
    else:
        links.pop(block_id, None)
