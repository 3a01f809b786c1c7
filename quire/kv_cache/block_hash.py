"""The name of a full page: a hash of its tokens, its extra keys and the page before it.

Called by the KV cache manager and the prefix tree, for other programs and tiers. Stateless. Equal names mean equal
prefixes, up to collisions; nothing in the cache itself is found by them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.core.request import ExtraKeys

BlockHashFn = Callable[[bytes, bytes, ExtraKeys], bytes]
"""(hash of the page before, token ids as little-endian int32, extra keys) -> hash of the page."""

ROOT_HASH = hashlib.sha256(b"quire prefix cache").digest()
"""Stands for the page before the first one."""

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


def bytes_by_page(page_tokens: np.ndarray) -> list[bytes]:
    """Of pages of tokens, [num_pages, block_size], each as it is hashed."""
    size = TOKEN_BYTES * page_tokens.shape[1]
    pages: list[bytes] = np.ascontiguousarray(page_tokens, dtype="<i4").view(f"V{size}").ravel().tolist()
    return pages


def hash_full_pages(
    token_ids: np.ndarray,
    block_size: int,
    extra_keys: Mapping[int, ExtraKeys],
    hash_fn: BlockHashFn = sha256_block_hash,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Hashes of the full pages of a sequence, in order.

    Args:
        token_ids: [num_tokens] int32; what follows the last full page is ignored.
        block_size: tokens per page.
        extra_keys: page number -> its extra keys.
        hash_fn: names one page.
        known: hashes of its first pages, which are not computed again.
    """
    num_full = len(token_ids) // block_size
    hashes = list(known[:num_full])
    parent = hashes[-1] if hashes else ROOT_HASH
    start = len(hashes)
    data, page_bytes = token_bytes(token_ids[start * block_size :]), TOKEN_BYTES * block_size
    for page in range(start, num_full):
        tokens = data[(page - start) * page_bytes : (page - start + 1) * page_bytes]
        parent = hash_fn(parent, tokens, extra_keys.get(page, ()))
        hashes.append(parent)
    return hashes
