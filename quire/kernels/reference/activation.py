"""Reference: the gated activation of the MLP."""

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
