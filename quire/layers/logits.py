"""From the last hidden state to a score for every token of the vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.options import TensorOptions


class LogitsHead(nn.Module):
    """The output projection.

    Args:
        tied_weight: the embedding's table, when the model uses it for both ends; shared, not copied.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, options: TensorOptions, tied_weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.weight = tied_weight if tied_weight is not None else options.parameter(vocab_size, hidden_size)

    def forward(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return nn.functional.linear(hidden_rows, self.weight).float()
