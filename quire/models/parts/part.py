"""Part: what a layer's mixers and feed-forward networks have in common. Subclassed by every part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.layers.weight_target import WeightTarget


class Part(nn.Module, ABC):
    """Computes its share of a layer's output from the normalized input.

    A part is made as `PartClass(build, arch, layer_idx, name)`: the `BuildContext`, its own data, the layer's number
    and its own name, as in "model.layers.0.self_attn". One that keeps something in the KV cache takes its place there
    from `build.cache_layers`.

    Attributes:
        takes_stream: it is given the residual stream, not what the layer's norm made of it.
    """

    takes_stream: bool = False

    @abstractmethod
    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]; `x` is not changed.

        Args:
            positions: [num_tokens] int64, of each token in its sequence.
        """

    @abstractmethod
    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This program's name of each checkpoint tensor, and where it goes; `name` is the part's."""
