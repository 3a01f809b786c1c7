"""One vector per token id: looked up as a model's input, multiplied as its output projection."""

from __future__ import annotations

import torch

from quire.layers.linear import Linear
from quire.layers.options import LayerOptions


class TokenTable(Linear):
    """[vocab_size, hidden_size]; one object serves both ends of a model that ties them."""

    def __init__(self, vocab_size: int, hidden_size: int, *, options: LayerOptions) -> None:
        method = options.kernels.table_method(vocab_size, hidden_size)
        super().__init__(hidden_size, vocab_size, bias=False, options=options, method=method)

    def lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32 or int64 -> [num_tokens, hidden_size]."""
        return self.method.gather_rows(self, token_ids)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return self.method.apply(self, hidden_rows, None, torch.float32)
