"""Reference: writing keys and values into their pages, and copying pages."""

from __future__ import annotations

import torch

from quire.utils.shapes import check_shapes


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write this step's keys and values into their pages, in place.

    Slot s is row s % block_size of page s // block_size. Negative slots are padding and skipped.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size]; mutated.
        slot_mapping: [num_tokens] int64; slots are distinct.

    Raises:
        ShapeError: a size differs from the above.

    Source: Kwon et al. 2023 (PagedAttention), section 4.1.
    """
    check_shapes(
        key=(key, "num_tokens num_kv_heads head_size"),
        value=(value, "num_tokens num_kv_heads head_size"),
        key_cache=(key_cache, "num_blocks block_size num_kv_heads head_size"),
        value_cache=(value_cache, "num_blocks block_size num_kv_heads head_size"),
        slot_mapping=(slot_mapping, "num_tokens"),
    )
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, block_size)
        key_cache[page, offset] = key[token]
        value_cache[page, offset] = value[token]


def copy_pages(cache: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy pages onto others, in place.

    Args:
        cache: [num_blocks, ...]; mutated.
        src_ids, dst_ids: [num_pages] int64; targets are distinct, and none is the source of another copy.
    """
    for source, target in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        cache[target] = cache[source]
