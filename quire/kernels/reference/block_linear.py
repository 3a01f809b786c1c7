"""Reference: products of activations quantised in groups of 32 inputs with a weight, in float64. No state.

Called by tests of the native kernels; quire/kernels/native/block_quant.py is what models run.
"""

from __future__ import annotations

import torch

GROUP_SIZE = 32
# Groups whose largest magnitude is below this count as zero.
LEAST_ABSMAX = 2.0**-96


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as int8, symmetric by the largest magnitude of every group.

    Args:
        x: [num_tokens, input_size] floats; `input_size` is a multiple of 32.

    Returns:
        (q, scales): [num_tokens, num_groups, 32] integers, half to even, and [num_tokens, num_groups, 1], float32;
        x is about q * scales.
    """
    groups = x.float().reshape(len(x), x.shape[1] // GROUP_SIZE, GROUP_SIZE)
    absmax = groups.abs().amax(dim=2, keepdim=True)
    is_zero = absmax < LEAST_ABSMAX
    # Of two tensors: torch divides a number by a tensor as the number times the rounded reciprocal.
    inverse = torch.where(is_zero, 0.0, torch.full_like(absmax, 127.0) / absmax)
    return torch.round(groups * inverse), torch.where(is_zero, 0.0, absmax / 127.0)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """X W^T + bias on quantised rows of `x`, and a bound of what its sums pass through.

    Args:
        x: [num_tokens, input_size] floats.
        weight: [output_size, input_size] floats.
        bias: [output_size] floats.

    Returns:
        (out, magnitude): both [num_tokens, output_size] float64; the second is the sum of all terms' magnitudes.
    """
    q, scales = quantize(x)
    rounded, wide = (q.double() * scales.double()).flatten(1), weight.double()
    out, magnitude = rounded @ wide.T, rounded.abs() @ wide.abs().T
    return (out, magnitude) if bias is None else (out + bias.double(), magnitude + bias.double().abs())
