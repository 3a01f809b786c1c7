"""Root-mean-square normalisation with a learned gain."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.options import LayerOptions


class RMSNorm(nn.Module):
    """Normalises the last dimension of its input."""

    def __init__(self, size: int, eps: float, *, options: LayerOptions) -> None:
        super().__init__()
        self.weight = options.parameter(size)
        self.eps = eps
        self.kernels = options.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise x + residual; returns the result and the sum, which is the next residual.

        `residual` may be overwritten: the sum takes its place.
        """
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
