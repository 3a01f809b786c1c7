"""Per-layer embeddings: a second table has a short vector of every token for each layer, added at the layer's end.

Built by the decoder, for the models that have them. Source: Google 2025 (Gemma 3n, Gemma 4), as released.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.config.model_arch import LayerArch, NormArch
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.weight_target import RepeatedTarget, WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.tensor_layouts import linear_targets


class PerLayerEmbedding(nn.Module):
    """(norm(projection of the embedding) + vector of the second table) / sqrt(2), of all layers at once.

    Args:
        size: elements of a token's vector for one layer.
    """

    def __init__(self, build: BuildContext, size: int, norm: NormArch) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        self.size = size
        self.kernels = options.kernels
        width = arch.num_layers * size
        self.table = TokenTable(arch.embedding.per_layer_vocab_size, width, options=options)
        self.projection = Linear(arch.hidden_size, width, bias=False, options=options)
        self.norm = Norm(size, norm, options=options)
        # Rounded to the model's dtype, as the factor on the embedding.
        self.table_scale = torch.tensor(size**0.5, dtype=options.dtype).item()
        self.projection_scale = arch.hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[num_tokens], [num_tokens, hidden_size] -> [num_tokens, num_layers * size]."""
        looked_up = self.kernels.scale(self.table.lookup(input_ids), self.table_scale)
        projected = self.kernels.scale(self.projection(embedded), self.projection_scale)
        normed = self.norm(projected.view(-1, self.size)).view_as(projected)
        return self.kernels.scale(self.kernels.add(looked_up, normed), 2.0**-0.5)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This program's name of each checkpoint tensor, and where it goes; `name` is the model's."""
        yield from self.table.targets(f"{name}.embed_tokens_per_layer")
        yield from linear_targets(self.projection, f"{name}.per_layer_model_projection")
        yield from self.norm.targets(f"{name}.per_layer_projection_norm")


class LayerEnd(nn.Module):
    """What a layer of Gemma 4 does with the residual stream at last: adds the layer's own input, and scales the sum.

    Attributes:
        scalar: the learned number, once for every element, as the kernel that multiplies takes it.
    """

    def __init__(self, build: BuildContext, layer: LayerArch) -> None:
        super().__init__()
        options, hidden_size = build.options, build.arch.hidden_size
        self.size, self.layer = layer.per_layer_input, layer
        self.kernels = options.kernels
        self.scalar = options.parameter(hidden_size) if layer.output_scale else None
        if self.size:
            assert layer.mlp is not None and layer.ffn_post_norm is not None, "layers with an input of their own"
            self.activation = layer.mlp.activation
            self.gate = Linear(hidden_size, self.size, bias=False, options=options)
            self.projection = Linear(self.size, hidden_size, bias=False, options=options)
            self.post_norm = Norm(hidden_size, layer.ffn_post_norm, options=options)

    def forward(self, x: torch.Tensor, per_layer_input: torch.Tensor | None) -> torch.Tensor:
        """The stream [num_tokens, hidden_size], and the layer's input [num_tokens, size] -> the stream."""
        if per_layer_input is not None:
            gates = self.kernels.activate(self.gate(x), self.activation)
            added = self.post_norm(self.projection(self.kernels.multiply(gates, per_layer_input)))
            x = self.kernels.add(added, x)
        return x if self.scalar is None else self.kernels.multiply(x, self.scalar)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This program's name of each checkpoint tensor, and where it goes; `name` is the layer's."""
        if self.size:
            yield from linear_targets(self.gate, f"{name}.per_layer_input_gate")
            yield from linear_targets(self.projection, f"{name}.per_layer_projection")
            yield from self.post_norm.targets(f"{name}.post_per_layer_input_norm")
        if self.scalar is not None:
            yield f"{name}.layer_scalar", RepeatedTarget(self.scalar.data, neutral=1.0)
