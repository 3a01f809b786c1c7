"""SaltedSiblings: with which extra keys (salts, tenants, adapters) a block's content follows a prefix.

Owned by the prefix tree. Costs one entry for each node whose block has extra keys, which only few have.
"""

from __future__ import annotations

import itertools

from quire.core.request import ExtraKeys


class SaltedSiblings:
    """Extra keys by the prefix that a block follows and the tokens it holds."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], dict[ExtraKeys, None]] = {}

    def add(self, parent: int, tokens: bytes, extra_keys: ExtraKeys) -> None:
        """A node of this content was made."""
        self._keys.setdefault((parent, tokens), {})[extra_keys] = None

    def remove(self, parent: int, tokens: bytes, extra_keys: ExtraKeys) -> None:
        """A node that was added goes."""
        keys = self._keys[parent, tokens]
        del keys[extra_keys]
        if not keys:
            del self._keys[parent, tokens]

    def keys_of(self, parent: int, tokens: bytes, most: int) -> list[ExtraKeys]:
        """The different extra keys with which there are nodes of this content, the `most` newest ones."""
        return list(itertools.islice(reversed(self._keys.get((parent, tokens), {})), most))

    def clear(self) -> None:
        """Remove all nodes."""
        self._keys.clear()
