"""Normalization of rows, with a learned gain: RMSNorm, and LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.config.model_arch import NormArch
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget


class Norm(nn.Module):
    """Normalizes the last dimension of its input: RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016).

    Attributes:
        weight: the gain, [size]; ones where the model has none.
        bias: [size], or None.
    """

    bias: nn.Parameter | None

    def __init__(self, size: int, arch: NormArch, *, options: LayerOptions) -> None:
        super().__init__()
        self.arch = arch
        self.weight = options.parameter(size)
        if not arch.has_gain:
            self.weight.data.fill_(1.0)
        self.register_parameter("bias", options.parameter(size) if arch.has_bias else None)
        self.eps = arch.eps
        self.is_centered = arch.is_centered
        self.kernels = options.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        if self.is_centered:
            return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize x + residual; returns the result and the sum, which is the next residual.

        `residual` may be overwritten: the sum takes its place.
        """
        if self.is_centered:
            return self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's tensors, by this program's names."""
        if self.arch.has_gain:
            offset = self.arch.gain_offset
            yield f"{name}.weight", TensorTarget(self.weight.data, offset, neutral=1.0 - offset)
        if self.bias is not None:
            yield f"{name}.bias", TensorTarget(self.bias.data)
