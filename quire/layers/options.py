"""How a layer's parameters are stored: one value, given to every constructor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Type and place of a layer's parameters."""

    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter without values yet, and without a gradient."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device), requires_grad=False)
