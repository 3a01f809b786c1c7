"""SaltedPages: with which extra keys (salts, tenants, adapters) a page's content is cached after a prefix.

Owned by the prefix index. Costs one entry for each cached page that has extra keys, which only few pages have.
"""

from __future__ import annotations

import itertools

from quire.core.request import ExtraKeys


class SaltedPages:
    """Extra keys by the prefix that a page follows and the tokens it holds."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], dict[ExtraKeys, None]] = {}

    def add(self, parent_id: int, tokens: bytes, extra_keys: ExtraKeys) -> None:
        """A page of this content was published."""
        self._keys.setdefault((parent_id, tokens), {})[extra_keys] = None

    def remove(self, parent_id: int, tokens: bytes, extra_keys: ExtraKeys) -> None:
        """A page that was added is forgotten."""
        keys = self._keys[parent_id, tokens]
        del keys[extra_keys]
        if not keys:
            del self._keys[parent_id, tokens]

    def keys_of(self, parent_id: int, tokens: bytes, most: int) -> list[ExtraKeys]:
        """The different extra keys with which this content is cached, the `most` newest ones."""
        return list(itertools.islice(reversed(self._keys.get((parent_id, tokens), {})), most))
