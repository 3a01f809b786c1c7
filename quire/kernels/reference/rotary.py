"""Reference: rotary position embedding of queries and keys."""

from __future__ import annotations

import torch


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading elements of each head; element i and element i + rotary_dim / 2 form a pair.

    Args:
        x: [num_tokens, num_heads, head_size].
        cos, sin: [num_tokens, 1, rotary_dim / 2] float32.

    Returns:
        A new tensor like `x`; elements from rotary_dim on are unchanged. Computed in float32.

    Source: Su et al. 2021 (RoFormer), section 3.2, with the pairing of the published checkpoints.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
