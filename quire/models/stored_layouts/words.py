"""Small integers in bytes, and the order that brings the inputs of a group together. Used by the layouts; pure."""

from __future__ import annotations

import torch


def unpack_bytes(packed: torch.Tensor, num_bits: int, size: int) -> torch.Tensor:
    """The fields of each row, from the lowest bits on.

    Args:
        packed: [num_rows, num_bytes] uint8.
        num_bits: 4 or 8.

    Returns:
        [num_rows, size] uint8: the first `size` of them.
    """
    if num_bits == 8:
        return packed[:, :size]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :size]


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """[num_rows, size] uint8 below 16 -> [num_rows, ceil(size / 2)] uint8, the even ones in the lower halves."""
    even, odd = values[:, ::2], values[:, 1::2]
    packed = even.clone(memory_format=torch.contiguous_format)
    packed[:, : odd.shape[1]] |= odd << 4
    return packed


def grouped_order(groups: torch.Tensor, group_size: int) -> tuple[torch.Tensor | None, bool]:
    """The inputs group by group, each group's in their order.

    Args:
        groups: [input_size] int64: the group of each input, at least 0.

    Returns:
        The order [input_size], None where it is 0, 1, 2, ...; and whether groups have `group_size` inputs each, the
        last one the rest.
    """
    size = len(groups)
    order = torch.argsort(groups, stable=True)
    are_whole = torch.equal(groups[order], torch.arange(size) // group_size)
    is_in_order = torch.equal(order, torch.arange(size))
    return None if is_in_order else order, are_whole
