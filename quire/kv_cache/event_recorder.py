"""KVEventRecorder: what has changed in a prefix index, as events for other programs.

Told by the prefix index, emptied by the engine core after each step. Owns what was not taken yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.core.kv_events import MEDIUM, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from quire.core.request import ExtraKeys


class KVEventRecorder:
    """Events in the order in which things happened; blocks that follow one another make one event.

    Args:
        block_size: tokens per block.
        group_idx: KV cache group; None where there is one.
    """

    def __init__(self, block_size: int, group_idx: int | None = None) -> None:
        self._block_size = block_size
        self._group_idx = group_idx
        self._events: list[KVEvent] = []

    def note_stored(
        self, block_hash: bytes, parent_hash: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys
    ) -> None:
        """A block can be found; it follows the block `parent_hash`, or none."""
        name, parent = external_hash(block_hash), None if parent_hash is None else external_hash(parent_hash)
        keys = [value for pair in extra_keys for value in pair] or None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and not keys and last.extra_keys is None:
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
            return
        self._events.append(
            BlockStored(
                [name], parent, list(token_ids), self._block_size, None, MEDIUM, None,
                extra_keys=None if keys is None else [keys], group_idx=self._group_idx,
            )
        )  # fmt: skip

    def note_removed(self, block_hash: bytes) -> None:
        """A block can no longer be found."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(external_hash(block_hash))
        else:
            self._events.append(BlockRemoved([external_hash(block_hash)], MEDIUM, self._group_idx))

    def note_cleared(self) -> None:
        """No block can be found any longer."""
        self._events.append(AllBlocksCleared())

    def add(self, events: Iterable[KVEvent]) -> None:
        """What happened to blocks behind the cache."""
        self._events += events

    def take(self) -> list[KVEvent]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events


def external_hash(block_hash: bytes) -> BlockHash:
    """The name of a block as others know it."""
    return int.from_bytes(block_hash[-8:], "big")
