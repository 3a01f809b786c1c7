"""MemoryPart: what the memory of an engine core's process is used for, as far as the engine has asked for it itself."""

from __future__ import annotations

from enum import IntEnum


class MemoryPart(IntEnum):
    """Parts, numbered as they are in the memory that a core shares with its watcher."""

    WEIGHTS = 0  # as the checkpoint has them
    PACKED_WEIGHTS = 1  # in the form of the kernels
    KV_CACHE = 2  # all blocks, used or not
    SWAP_SPACE = 3
    HOST_TIER = 4  # blocks in host memory now
    CAPTURES = 5  # results of captured steps
    DRAFTS = 6  # weights of a model or heads that draft
    GRAMMARS = 7  # compiled ones that are kept
    HUGE_PAGES_ASKED = 8  # of all parts, for which huge pages were asked for

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name.lower()
