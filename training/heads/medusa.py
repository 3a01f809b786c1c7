"""Medusa heads: head i guesses the token i + 2 places after a hidden state, all of them at once.

A head is residual blocks `x + silu(W x + b)` before an output matrix. Here that matrix is the target's own for all
heads (`original_lm_head` in the configuration): one product for the rows of all heads, and small files. Parameter
names are those of published Medusa checkpoints. Called by heads/train.py and heads/acceptance.py.
Source: Cai et al. 2024 (Medusa), section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    """One residual block; it begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to [..., hidden]."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """All heads.

    Args:
        hidden_size: Of the target.
        num_heads: Tokens that are guessed.
        num_layers: Residual blocks of each head.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.medusa_head = nn.ModuleList(
            nn.Sequential(*[_Block(hidden_size) for _ in range(num_layers)]) for _ in range(num_heads)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """States before the output matrix, [num_heads, ..., hidden], of hidden states [..., hidden]."""
        return torch.stack([head(hidden) for head in self.medusa_head])
