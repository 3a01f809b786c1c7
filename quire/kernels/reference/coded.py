"""Reference: products with weights kept as codes of 4 or 8 bits, and how plain weights become such codes."""

from __future__ import annotations

import torch

from quire.kernels.reference.block_formats import NF4_VALUES
from quire.kernels.reference.linear import linear_in_order as plain_in_order

E4M3_MAX = 448.0


def linear_in_order(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, group_size: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """X W^T + bias in the order of the kernels: what their result is equal to, bit for bit.

    Args:
        x: [num_rows, input_size] bfloat16, in the order of the weight's columns.
        values: [output_size, input_size]: what the codes stand for, before their scales, as bfloat16.
        scales: [output_size, num_groups] float32.
        group_size: inputs of a group, a multiple of 32; 0 = all.

    Returns:
        [num_rows, output_size] float32.
    """
    total = torch.zeros(len(x), len(values))
    size = group_size or x.shape[1]
    for group in range(scales.shape[1]):
        inputs = slice(group * size, (group + 1) * size)
        total += plain_in_order(x[:, inputs], values[:, inputs]) * scales[None, :, group]
    return total if bias is None else total + bias.float()


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to 8-bit floats (e4m3), each by its largest magnitude, which becomes the largest code.

    Args:
        weight: [num_rows, input_size].

    Returns:
        codes [num_rows, input_size] float8_e4m3fn and scales [num_rows, 1] float32.

    Source: Micikevicius et al. 2022 (FP8 formats for deep learning), section 3.
    """
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / E4M3_MAX)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def quantize_nf4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of each row to the nearest numbers of NF4's table, times the largest magnitude of the group.

    Args:
        weight: [num_rows, input_size].
        group_size: inputs that share a scale; the last group may have fewer.

    Returns:
        codes [num_rows, ceil(input_size / 2)] uint8, the even inputs in the lower halves, and scales
        [num_rows, num_groups] float32.

    Source: Dettmers et al. 2023 (QLoRA), section 3 and appendix E.
    """
    num_rows, input_size = weight.shape
    num_groups = -(-input_size // group_size)
    padded = torch.zeros(num_rows, num_groups * group_size)
    padded[:, :input_size] = weight
    groups = padded.view(num_rows, num_groups, group_size)
    scales = groups.abs().amax(dim=2)
    table = torch.tensor(NF4_VALUES)
    nearest = torch.bucketize(groups / scales.clamp(min=1e-30)[..., None], (table[1:] + table[:-1]) / 2)
    codes = nearest.view(num_rows, -1)[:, : input_size + input_size % 2].to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales
