"""Reference: root-mean-square normalisation."""

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
