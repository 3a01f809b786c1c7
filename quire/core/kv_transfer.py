"""Blocks that travel between the KV cache and a tier behind it (another process, a disk, a dictionary), as messages.

Made by the scheduler's half of a tier, carried out by the worker's half, reported back with a later step. A swap, whose
host blocks the scheduler numbers itself, has `BlockCopies` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Whole blocks that are loaded from a tier, or saved to it.

    Attributes:
        transfer_id: by which it is reported; unique within an engine core.
        keys: the tier's name of each block.
        block_ids: [num_pages] int32; the blocks of the cache. They belong to the transfer until it is reported.
        time_limit_s: seconds after which a load is to fail; None = there is no limit.
        is_async: no row reads or writes the blocks before it is reported; False = the step that carries it needs them.
    """

    transfer_id: int
    keys: tuple[bytes, ...]
    block_ids: np.ndarray
    is_async: bool = True
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class KVTransferMeta:
    """Transfers that begin with a step, before it computes."""

    loads: tuple[BlockTransfer, ...] = ()
    saves: tuple[BlockTransfer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves)


@dataclass(frozen=True, slots=True)
class KVTransferResults:
    """Ids of transfers that have ended since the last report; blocks of a failed load hold anything."""

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
