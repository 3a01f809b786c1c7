"""Reference: a linear layer, with the order of summation that every native tier keeps."""

from __future__ import annotations

import torch

TILE_DEPTH = 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X W^T + bias in float64, not rounded: what a kernel's result is close to.

    Args:
        x: [num_rows, input_size].
        weight: [output_size, input_size].
        bias: [output_size].

    Returns:
        [num_rows, output_size] float64.
    """
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def linear_in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X W^T + bias in float32, in the order of the tile unit: what a kernel's result is equal to, bit for bit.

    Inputs come in tiles of 32. In a tile the even inputs form one chain of sums and the odd ones another, each from
    zero; their sum is added to the total. The bias is added last.

    Args:
        x: [num_rows, input_size].
        weight: [output_size, input_size].
        bias: [output_size].

    Returns:
        [num_rows, output_size] float32.

    Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
    """
    wide, weights = x.float(), weight.float()
    total = torch.zeros(len(x), len(weight))
    for tile in range(0, x.shape[1], TILE_DEPTH):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        end = min(tile + TILE_DEPTH, x.shape[1])
        for k in range(tile, end):
            chain = even if k % 2 == 0 else odd
            chain += wide[:, k, None] * weights[None, :, k]
        total += even + odd
    return total if bias is None else total + bias.float()
