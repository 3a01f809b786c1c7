"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.options import TensorOptions


class TokenEmbedding(nn.Module):
    """A table of one vector per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, options: TensorOptions) -> None:
        super().__init__()
        self.weight = options.parameter(vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32 or int64 -> [num_tokens, hidden_size]."""
        return nn.functional.embedding(input_ids, self.weight)
