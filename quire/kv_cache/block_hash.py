"""The name of a full block: a hash of its tokens, its extra keys and the block before it.

Called by the KV cache manager and the prefix tree, for other programs and tiers. Stateless. Equal names mean equal
prefixes, up to collisions; nothing in the cache itself is found by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.core.request import ExtraKeys

BlockHashFn = Callable[[bytes, bytes, ExtraKeys], bytes]
"""(hash of the block before, token ids as little-endian int32, extra keys) -> hash of the block."""

ROOT_HASH = hashlib.sha256(b"quire prefix cache").digest()
"""Stands for the block before the first one."""

TOKEN_BYTES = 4
"""Bytes of one hashed token id."""


def sha256_block_hash(parent: bytes, tokens: bytes, extra_keys: ExtraKeys) -> bytes:
    """SHA-256 over parent, tokens and keys; unambiguous because the first two have a fixed length."""
    if extra_keys:
        tokens += repr(extra_keys).encode()
    return hashlib.sha256(parent + tokens).digest()


BLOCK_HASHES: dict[str, BlockHashFn] = {"sha256": sha256_block_hash}
"""By the name that `prefix_caching_hash_algo` has for it."""


def token_bytes(token_ids: np.ndarray) -> bytes:
    """Token ids as they are hashed: little-endian int32."""
    return token_ids.astype("<i4", copy=False).tobytes()


def bytes_by_block(block_tokens: np.ndarray) -> list[bytes]:
    """Of blocks of tokens, [num_pages, block_size], each as it is hashed."""
    size = TOKEN_BYTES * block_tokens.shape[1]
    blocks: list[bytes] = np.ascontiguousarray(block_tokens, dtype="<i4").view(f"V{size}").ravel().tolist()
    return blocks


def hash_full_blocks(
    token_ids: np.ndarray,
    block_size: int,
    extra_keys: Mapping[int, ExtraKeys],
    hash_fn: BlockHashFn = sha256_block_hash,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Hashes of the full blocks of a sequence, in order.

    Args:
        token_ids: [num_tokens] int32; what follows the last full block is ignored.
        block_size: tokens per block.
        extra_keys: block number -> its extra keys.
        hash_fn: names one block.
        known: hashes of its first blocks, which are not computed again.
    """
    num_full = len(token_ids) // block_size
    hashes = list(known[:num_full])
    parent = hashes[-1] if hashes else ROOT_HASH
    start = len(hashes)
    data, page_bytes = token_bytes(token_ids[start * block_size :]), TOKEN_BYTES * block_size
    for block in range(start, num_full):
        tokens = data[(block - start) * page_bytes : (block - start + 1) * page_bytes]
        parent = hash_fn(parent, tokens, extra_keys.get(block, ()))
        hashes.append(parent)
    return hashes
