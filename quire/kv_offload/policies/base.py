"""EvictionPolicy: which keys a store of bounded size keeps. Owned by a store; knows keys and sizes, no contents."""

from __future__ import annotations

from abc import ABC, abstractmethod


class EvictionPolicy(ABC):
    """Keys with their sizes, at most `budget` bytes of them.

    Args:
        budget: bytes.

    Attributes:
        num_bytes: of the keys that are kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def insert(self, key: bytes, size: int) -> list[bytes]:
        """Keep a key that is not kept.

        Returns:
            The keys that go for it, in order; the key itself, alone, if it cannot be kept.
        """

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """A key that is kept was used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a key, if it is kept, as if it had never been."""
