"""A class's output projection without its decoder: scaling, soft caps and all else that the class does to logits.

Used by `model` and, on tensors without values, by `probe`. No state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


class _GivenOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output, of which nothing but the hidden states is there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHidden(nn.Module):
    """In the place of the decoder: gives the hidden states that it is called with."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> BaseModelOutputWithPast:
        """The hidden states, which came as embeddings."""
        return _GivenOutput(last_hidden_state=inputs_embeds)


def take_decoder(model: PreTrainedModel) -> nn.Module:
    """The decoder of `model`, which has none from then on."""
    decoder: nn.Module = getattr(model, model.base_model_prefix)
    setattr(model, model.base_model_prefix, _GivenHidden())
    return decoder


def logits_of(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """[num_rows, hidden_size] -> [num_rows, vocab_size], by a model whose decoder was taken."""
    logits: torch.Tensor = model(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
    return logits
