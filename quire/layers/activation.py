"""The gated activation between the two halves of an MLP."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.reference.activation import silu_and_mul


class SiluAndMul(nn.Module):
    """[num_tokens, 2 * intermediate_size] (gate, up) -> [num_tokens, intermediate_size]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return silu_and_mul(x)
