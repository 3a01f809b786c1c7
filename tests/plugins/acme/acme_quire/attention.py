"""An attention backend: Quire's readable one, and a count of its calls."""

from __future__ import annotations

from typing import Any

import torch

from quire.attention.backends.torch_reference import TorchReferenceBackend


class AcmeAttention(TorchReferenceBackend):
    """Attends as the reference does."""

    quire_contract = 1
    name = "acme_attention"
    preferred_block_size = 8
    num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        type(self).num_calls += 1
        return super().forward(*args, **kwargs)
