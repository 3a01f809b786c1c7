"""StagedBlocks: memory that another program reads and writes in place of the KV cache: blocks with their names.

Made by connectors whose other side moves memory by itself (`staged_transfers`). Whatever that side mixes up, tears or
writes too late is noticed here: a slot holds the block's name and a checksum over both, and only what fits goes into
the cache.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Sequence

import torch

from quire.kv_transfer.block_files import DamagedBlockError

NAME_BYTES = CHECKSUM_BYTES = 32
HEADER_BYTES = NAME_BYTES + CHECKSUM_BYTES


class StagedBlocks:
    """Slots for blocks.

    Args:
        shapes: of a block's parts, in bytes, as `BlockAccess.read` gives them without their first dimension.
        block_size: tokens per block.
        num_slots: blocks that there is room for.
        width: bytes per token of a slot (`staged_width`).
        memory: where they are; None = anywhere.

    Attributes:
        tensor: [num_slots, block_size, bytes per token] uint8: a cache of one layer, as other programs see it.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], block_size: int, num_slots: int, *, width: int | None = None,
        memory: mmap.mmap | None = None,
    ) -> None:  # fmt: skip
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [int(torch.Size(shape).numel()) for shape in self._shapes]
        self._num_bytes = HEADER_BYTES + sum(self._sizes)
        width = width or staged_width(shapes, block_size)
        memory = memory or mmap.mmap(-1, num_slots * block_size * width)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, block_size, width)

    def put(self, slot: int, name: bytes, parts: Sequence[torch.Tensor]) -> None:
        """Copy a block and its name ([NAME_BYTES]) to a slot; `parts` are those of `BlockAccess.read` of one block."""
        place = self._place(slot)
        torch.cat([part.reshape(-1) for part in parts], out=place[HEADER_BYTES:])
        header = name + self._checksum(name, place)
        place[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def take(self, slot: int, name: bytes) -> list[torch.Tensor]:
        """A copy of the block in a slot, as `BlockAccess.write` wants one block.

        Raises:
            DamagedBlockError: it is another block, or not whole.
        """
        place = self._place(slot).clone()  # the other side may still be writing
        if place[:HEADER_BYTES].numpy().tobytes() != name + self._checksum(name, place):
            raise DamagedBlockError(f"block {name.hex()[:16]} is damaged, or another block")
        parts = torch.split(place[HEADER_BYTES:], self._sizes)
        return [part.view(1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def clear(self, slot: int) -> None:
        """Forget the block in a slot, so that nothing is found where the other side wrote nothing."""
        self._place(slot)[:HEADER_BYTES] = 0

    def _place(self, slot: int) -> torch.Tensor:
        """The bytes of a slot, where they are now: the other side may move the tensor to memory that it shares."""
        return self.tensor[slot].view(-1)[: self._num_bytes]

    @staticmethod
    def _checksum(name: bytes, place: torch.Tensor) -> bytes:
        digest = hashlib.blake2b(name, digest_size=CHECKSUM_BYTES)
        digest.update(place[HEADER_BYTES:].numpy().data)
        return digest.digest()


def staged_width(shapes: Sequence[Sequence[int]], block_size: int, multiple: int = 1) -> int:
    """Bytes per token of a slot, so that a block, its name and its checksum fit; a slot is a multiple of `multiple`."""
    num_bytes = HEADER_BYTES + sum(int(torch.Size(tuple(shape)).numel()) for shape in shapes)
    per_token = -(-num_bytes // block_size)
    step = multiple // math.gcd(multiple, block_size)
    return -(-per_token // step) * step
