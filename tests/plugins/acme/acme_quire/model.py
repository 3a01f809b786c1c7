"""The model itself: what differs from the decoder that Quire's families share."""

from __future__ import annotations

import torch

from quire.models.decoder import DecoderForCausalLM


class AcmeForCausalLM(DecoderForCausalLM):
    """The likeliest token of a Llama is this model's least likely."""

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return -super().compute_logits(hidden_rows)
