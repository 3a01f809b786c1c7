"""How many bytes of weights a step reads on a rank: what is loaded, whatever format it is in. Called by the worker."""

from __future__ import annotations

from torch import nn

from quire.core.step_perf import WeightBytes
from quire.layers.embedding import TokenTable
from quire.layers.experts import ExpertLinear
from quire.layers.head_linear import HeadLinear
from quire.layers.linear import Linear


def count_weights(model: nn.Module) -> WeightBytes:
    """Of a model that is loaded; the last table of tokens is the output projection's."""
    layer_bytes = head_bytes = num_weights = 0
    for module in model.modules():
        if isinstance(module, TokenTable):
            head_bytes = _bytes_of(module)
        elif isinstance(module, Linear | ExpertLinear | HeadLinear):
            num_matrices = getattr(module, "num_experts", getattr(module, "num_heads", 1))
            num_weights += num_matrices * module.input_size * module.output_size
            layer_bytes += _bytes_of(module)
    return WeightBytes(layer_bytes, head_bytes, num_weights)


def _bytes_of(module: nn.Module) -> int:
    """Of a layer's weight with its scales; biases are not worth counting."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return sum(one.numel() * one.element_size() for name, one in tensors if not name.endswith("bias"))
