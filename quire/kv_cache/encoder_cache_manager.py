"""Slots for the outputs of media encoders: which item is kept where, who uses it, what may be evicted.

Called by whoever plans a step that embeds media; `NoEncoderCache` stands in for it where there is no encoder. Owns the
budget of embeddings; the embeddings themselves are the worker's, which drops those that `take_freed` names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, clip or recording of a prompt.

    Attributes:
        content_hash: names its content, and how it was processed; equal hashes share a slot.
        num_embeddings: vectors that its encoder puts out.
    """

    content_hash: str
    num_embeddings: int


class EncoderCache(Protocol):
    """What a planner of steps asks."""

    def has(self, handle: int, item: MediaItem) -> bool:
        """Whether the item's output is there; the request becomes one of its users."""

    def can_allocate(self, item: MediaItem, num_left: int) -> bool:
        """Whether the item may be encoded in this step, of whose budget `num_left` embeddings are left."""

    def allocate(self, handle: int, item: MediaItem) -> None:
        """Reserve the item's slot for a request; `can_allocate` said yes."""

    def free(self, handle: int, content_hash: str) -> None:
        """The request has read the item's output to its end."""

    def free_request(self, handle: int) -> None:
        """The request ends, or is preempted."""

    def take_freed(self) -> Sequence[str]:
        """Content hashes whose outputs were evicted since the last call."""


class EncoderCacheManager:
    """Counts embeddings. What no request uses stays until its room is needed, the least recently used first.

    Args:
        num_slots: embeddings that the worker can keep.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_taken = 0  # by items in use
        self._sizes: dict[str, int] = {}
        self._users: dict[str, set[int]] = {}
        self._items_of: dict[int, set[str]] = {}
        self._unused: OrderedDict[str, None] = OrderedDict()  # the next to be evicted first
        self._num_unused = 0
        self._freed: list[str] = []

    @property
    def num_free_slots(self) -> int:
        """Embeddings that there is room for, if all that is unused goes."""
        return self._num_slots - self._num_taken

    def has(self, handle: int, item: MediaItem) -> bool:
        """Whether the item's output is there; the request becomes one of its users."""
        if item.content_hash not in self._sizes:
            return False
        self._use(handle, item.content_hash)
        return True

    def can_allocate(self, item: MediaItem, num_left: int) -> bool:
        """Whether the item may be encoded in this step, of whose budget `num_left` embeddings are left."""
        return item.num_embeddings <= min(num_left, self.num_free_slots)

    def allocate(self, handle: int, item: MediaItem) -> None:
        """Reserve the item's slot for a request; `can_allocate` said yes, and it is not there yet."""
        assert item.content_hash not in self._sizes, "an item is encoded once"
        assert item.num_embeddings <= self.num_free_slots, "more embeddings than there is room for"
        while self._num_taken + self._num_unused + item.num_embeddings > self._num_slots:
            evicted, _ = self._unused.popitem(last=False)
            self._num_unused -= self._sizes.pop(evicted)
            self._freed.append(evicted)
        if item.content_hash in self._freed:
            self._freed.remove(item.content_hash)  # it is written again before anything is dropped
        self._sizes[item.content_hash] = item.num_embeddings
        self._unused[item.content_hash] = None
        self._num_unused += item.num_embeddings
        self._use(handle, item.content_hash)

    def free(self, handle: int, content_hash: str) -> None:
        """The request has read the item's output to its end; it may come once more, which does nothing."""
        items = self._items_of.get(handle, set())
        if content_hash not in items:
            return
        items.discard(content_hash)
        if not items:
            del self._items_of[handle]
        users = self._users[content_hash]
        users.discard(handle)
        if not users:
            del self._users[content_hash]
            size = self._sizes[content_hash]
            self._unused[content_hash] = None
            self._num_taken, self._num_unused = self._num_taken - size, self._num_unused + size

    def free_request(self, handle: int) -> None:
        """The request ends, or is preempted: it uses nothing any longer."""
        for content_hash in sorted(self._items_of.get(handle, ())):
            self.free(handle, content_hash)

    def take_freed(self) -> Sequence[str]:
        """Content hashes whose outputs were evicted since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _use(self, handle: int, content_hash: str) -> None:
        if content_hash in self._unused:
            del self._unused[content_hash]
            size = self._sizes[content_hash]
            self._num_taken, self._num_unused = self._num_taken + size, self._num_unused - size
        self._users.setdefault(content_hash, set()).add(handle)
        self._items_of.setdefault(handle, set()).add(content_hash)


class NoEncoderCache:
    """For models without an encoder: no request has media."""

    def has(self, handle: int, item: MediaItem) -> bool:
        """Never."""
        return False

    def can_allocate(self, item: MediaItem, num_left: int) -> bool:
        """Never."""
        return False

    def allocate(self, handle: int, item: MediaItem) -> None:
        """Not to be called."""
        raise AssertionError("a model without an encoder has no media")

    def free(self, handle: int, content_hash: str) -> None:
        """Nothing is kept."""

    def free_request(self, handle: int) -> None:
        """Nothing is kept."""

    def take_freed(self) -> Sequence[str]:
        """Nothing is kept."""
        return ()
