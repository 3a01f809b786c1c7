"""Reference: normalization of rows."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square, then multiply by `weight`.

    Computed in float32 and rounded to the dtype of `x` before the product, as the families' own code does.

    Args:
        x: [..., size].
        weight: [size].

    Source: Zhang and Sennrich 2019 (Root Mean Square Layer Normalization), equation 4.
    """
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * inverse_rms).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the sum: returns (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    num_groups: int = 1,
    gate_first: bool = False,
) -> torch.Tensor:
    """Normalise the groups of each row and multiply by silu(gate) after that, or before; float32, rounded once.

    Args:
        x, gate: [num_rows, num_groups * size].
        weight: [size], which all groups share, or [num_groups * size].
        gate_first: the norm is that of x * silu(gate), as Mamba 2 has it.

    Source: Yang et al. 2025 (Gated DeltaNet), section 3.4; Dao and Gu 2024 (Mamba-2), section 7.1.
    """
    groups = (len(x), num_groups, -1)
    wide, gates = x.float().reshape(groups), torch.nn.functional.silu(gate.float()).reshape(groups)
    if gate_first:
        wide = wide * gates
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    weighed = normed * weight.float().view(-1, normed.shape[-1])
    return (weighed if gate_first else weighed * gates).to(x.dtype).reshape(x.shape)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Subtract each row's mean, divide by its standard deviation, multiply by `weight` and add `bias`.

    Computed in float32, rounded once to the dtype of `x`.

    Args:
        x: [..., size].
        weight, bias: [size]; without a bias None.

    Source: Ba et al. 2016 (Layer Normalization), equation 4.
    """
    wide = x.float()
    centered = wide - wide.mean(dim=-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (normalized if bias is None else normalized + bias.float()).to(x.dtype)
