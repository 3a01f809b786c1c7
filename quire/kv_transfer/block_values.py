"""A block as one value under one key, for stores of keys and values: a checksum of key and bytes, then the bytes.

Used by `hicache`, `mooncake_store` and `redis`. What a store cut, mixed up or damaged is noticed. Pure functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.kv_transfer.block_files import DamagedBlockError

CHECKSUM_BYTES = 32


def key_of(layout_digest: str, name: bytes) -> str:
    """Of block `name` in caches of this layout."""
    return f"{layout_digest[:32]}{name.hex()}"


def value_bytes(shapes: Sequence[tuple[int, ...]]) -> int:
    """Size of the value of a block whose tensors have these shapes, in bytes."""
    return CHECKSUM_BYTES + sum(int(np.prod(shape)) for shape in shapes)


def pack(key: str, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """[value_bytes] uint8: the value of a block.

    Args:
        tensors: uint8.
    """
    payload = np.concatenate([np.ascontiguousarray(tensor).reshape(-1) for tensor in tensors])
    return np.concatenate([np.frombuffer(_checksum(key, payload), dtype=np.uint8), payload])


def unpack(key: str, value: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """What was packed, in arrays that may be written.

    Args:
        value: [n] uint8.

    Raises:
        DamagedBlockError: it is not this block, or not whole.
    """
    checksum, payload = value[:CHECKSUM_BYTES].tobytes(), value[CHECKSUM_BYTES:]
    if len(value) != value_bytes(shapes) or checksum != _checksum(key, payload):
        raise DamagedBlockError(f"block {key[32:48]} is damaged, or another block")
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = np.split(payload, np.cumsum(sizes)[:-1])
    return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]


def _checksum(key: str, payload: Any) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(np.ascontiguousarray(payload).data)
    return digest.digest()
