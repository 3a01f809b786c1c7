"""How a layer's parameters are stored and what computes it: one value, given to every constructor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from quire.layers.kernels import LayerKernels, TorchKernels


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Type and place of a layer's parameters, and the kernels that compute it."""

    dtype: torch.dtype
    device: torch.device
    kernels: LayerKernels = field(default_factory=TorchKernels)

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter without values yet, and without a gradient."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device), requires_grad=False)
