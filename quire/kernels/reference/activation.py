"""Reference: the gated activations of the MLP."""

from __future__ import annotations

import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The first half of each row through SiLU, times the second half.

    Args:
        x: [num_tokens, 2 * intermediate_size].

    Returns:
        [num_tokens, intermediate_size].

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5 (SwiGLU with beta 1).
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The first half of each row through GELU, times the second half.

    Args:
        x: [num_tokens, 2 * intermediate_size].
        approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5 (GEGLU).
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up
