"""Transport: how the bytes of blocks travel from a prefill engine to a decode engine.

One is made for each half of the connector that moves blocks. `InlineTransport` sends them behind its messages, over the
connection that there is anyway, and needs no package. Others read the prefill engine's memory where it is: they get its
addresses when a connection begins (`RemoteMemory`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.connector import Tensor
from quire.kv_transfer.pull.messages import Blocks, Channel, PeerError

CHUNK_BYTES = 4 << 20
"""About how much is asked for at once."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The cache of an engine.

    Attributes:
        tensors: in the order of the layout's, [num_blocks, ...].
        block_bytes: of one block in each tensor.
    """

    tensors: Sequence[Tensor]
    block_bytes: Sequence[int]

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return len(self.tensors[0])

    @property
    def chunk_size(self) -> int:
        """Blocks that are asked for at once."""
        return max(1, CHUNK_BYTES // sum(self.block_bytes))

    @property
    def arena_bytes(self) -> int:
        """Of so many blocks."""
        return self.chunk_size * sum(self.block_bytes)


class Reader(ABC):
    """One connection of a transport; used by one thread."""

    @abstractmethod
    def read(self, channel: Channel, blocks: Blocks) -> list[np.ndarray]:
        """Bytes of blocks: per tensor of the layout [num_blocks, block_bytes] uint8, valid until the next call.

        Raises:
            OSError: they cannot be read now.
            PeerError: the other engine announced what cannot be.
        """

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Nothing is read any longer."""


class Transport(ABC):
    """Moves bytes of blocks."""

    name: str
    is_inline = False

    @abstractmethod
    def expose(self, memory: CacheMemory) -> bytes:
        """Let other engines read the cache; returns what they have to know (`Welcome.transport`).

        Raises:
            ConfigError: this cache cannot be read so.
        """

    @abstractmethod
    def connect(self, description: bytes, memory: CacheMemory) -> Reader:
        """Reads from the engine that gave `description`. Raises OSError or PeerError."""

    def close(self) -> None:  # noqa: B027 (as above)
        """The engine ends; harmless when repeated."""


class InlineTransport(Transport):
    """Bytes behind messages."""

    name = "tcp"
    is_inline = True

    def expose(self, memory: CacheMemory) -> bytes:
        """As `Transport`."""
        return b""

    def connect(self, description: bytes, memory: CacheMemory) -> Reader:
        """As `Transport`."""
        return _InlineReader(memory)


class _InlineReader(Reader):
    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._arena = np.empty(memory.arena_bytes, dtype=np.uint8)

    def read(self, channel: Channel, blocks: Blocks) -> list[np.ndarray]:
        num_bytes = len(blocks.block_ids) * sum(self._memory.block_bytes)
        if blocks.num_bytes != num_bytes:
            raise PeerError(f"{blocks.num_bytes} bytes were announced for blocks of {num_bytes}")
        channel.receive_into(self._arena.data[:num_bytes])
        return split(self._arena, len(blocks.block_ids), self._memory.block_bytes)


def split(arena: np.ndarray, num_blocks: int, block_bytes: Sequence[int]) -> list[np.ndarray]:
    """The first bytes of `arena` as the blocks of one tensor after the other: each [num_blocks, block_bytes]."""
    ends = np.cumsum([num_blocks * size for size in block_bytes]).tolist()
    starts = [0, *ends[:-1]]
    return [arena[start:end].reshape(num_blocks, -1) for start, end in zip(starts, ends, strict=True)]


Address = Annotated[int, msgspec.Meta(ge=0)]


class RemoteMemory(msgspec.Struct, frozen=True):
    """Where the blocks of an engine are.

    Attributes:
        agent: by which the transport reaches the engine.
        addresses: of block 0 in each tensor of the layout.
    """

    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    addresses: Annotated[list[Address], msgspec.Meta(max_length=4096)]

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    def pieces(self, block_ids: Sequence[int], block_bytes: Sequence[int], local: int) -> list[tuple[int, int, int]]:
        """(remote address, local address, bytes) of blocks, to lie at `local` as `split` has them."""
        pieces = []
        for address, size in zip(self.addresses, block_bytes, strict=True):
            for block_id in block_ids:
                pieces.append((address + block_id * size, local, size))
                local += size
        return pieces


def decode_memory(description: bytes, memory: CacheMemory) -> RemoteMemory:
    """What another engine's `expose` gave, for a cache like `memory`. Raises PeerError."""
    try:
        remote = msgspec.msgpack.decode(description, type=RemoteMemory)
    except msgspec.DecodeError as error:
        raise PeerError(f"not a description of memory: {error}") from None
    if len(remote.addresses) != len(memory.tensors):
        raise PeerError(f"{len(remote.addresses)} tensors are described, not {len(memory.tensors)}")
    return remote


def addresses_of(memory: CacheMemory, name: str) -> list[int]:
    """Of block 0 in each tensor.

    Raises:
        ConfigError: the blocks do not lie one after the other in host memory.
    """
    addresses = []
    for tensor, size in zip(memory.tensors, memory.block_bytes, strict=True):
        block: Any = tensor[0]
        if tensor.get_device() >= 0 or not block.is_contiguous() or tensor.stride(0) * tensor.itemsize != size:
            raise ConfigError(
                f"{FIELD}: {name} reads blocks that lie in one piece in host memory; those of this engine do not",
                hint="use TCPConnector, or the attention backend native_cpu", field=FIELD,
            )  # fmt: skip
        addresses.append(tensor.data_ptr())
    return addresses
