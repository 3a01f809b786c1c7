"""Quire's projections and token tables with the call of torch's modules, in whose places they are put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quire.layers.embedding import TokenTable
from quire.layers.kernels import LayerKernels
from quire.layers.linear import Linear
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget


class FlatLinear(Linear):
    """In the place of a `torch.nn.Linear`.

    Attributes:
        weight: an empty tensor where the kernels pack the real one: classes ask for its type.
    """

    def __init__(self, input_size: int, output_size: int, has_bias: bool, options: LayerOptions) -> None:
        super().__init__(input_size, output_size, bias=has_bias, options=options)
        self.in_features, self.out_features = input_size, output_size
        if not hasattr(self, "weight"):
            self.__dict__["weight"] = torch.empty(0, dtype=options.dtype, device=options.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., input_size] -> [..., output_size]."""
        return super().forward(x.reshape(-1, self.input_size)).view(*x.shape[:-1], self.output_size)


class FlatTable(TokenTable):
    """In the place of a `torch.nn.Embedding` of tokens, of the output projection, or of both."""

    def __init__(self, vocab_size: int, hidden_size: int, options: LayerOptions) -> None:
        super().__init__(vocab_size, hidden_size, options=options)
        self.num_embeddings, self.embedding_dim = vocab_size, hidden_size

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] integers -> [..., hidden_size]."""
        return self.lookup(token_ids.reshape(-1)).view(*token_ids.shape, self.input_size)


class OutputTable(nn.Module):
    """In the place of the output projection, which gives float32 whatever the model's type.

    Args:
        table: its weight, which may be that of the input too.
        bias: [vocab_size].
    """

    bias: nn.Parameter | None

    def __init__(self, table: FlatTable, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.table = table
        self.register_parameter("bias", bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., vocab_size] float32."""
        table = self.table
        logits = table.method.apply(table, hidden.reshape(-1, table.input_size), self.bias, torch.float32)
        return logits.view(*hidden.shape[:-1], table.output_size)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each tensor, and where it goes; `name` is this module's."""
        yield f"{name}.weight", self.table.method.row_target(self.table, 0, self.table.output_size)
        if self.bias is not None:
            yield f"{name}.bias", TensorTarget(self.bias.data)


class MatrixWeight(torch.Tensor):
    """A matrix that classes multiply by themselves, as routers do: in `linear`, by Quire's product.

    It is packed for that when it is first used, in the type of the input; values do not change after.
    """

    kernels: LayerKernels
    packed: dict[torch.dtype, nn.Module]

    @staticmethod
    def of(values: torch.Tensor, kernels: LayerKernels) -> MatrixWeight:
        """The matrix `values` [output_size, input_size], on the same memory."""
        weight = values.as_subclass(MatrixWeight)
        weight.kernels, weight.packed = kernels, {}
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's operations as they are, but for `linear`, and conversions, which keep the class."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and isinstance(args[1], cls):
                return args[1].times(args[0], *args[2:], **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        if func in CONVERSIONS and isinstance(args[0], cls):
            result = result.as_subclass(cls)
            result.kernels, result.packed = args[0].kernels, args[0].packed
        return result

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input_size] -> [..., output_size]."""
        output_size, input_size = self.shape
        layer = self.packed.get(x.dtype)
        method = self.kernels.dense_method()
        if layer is None:
            layer = nn.Module()
            method.create_weights(layer, output_size, input_size, x.dtype, x.device)
            method.row_target(layer, 0, output_size).load(self.as_subclass(torch.Tensor))
            self.packed[x.dtype] = layer
        flat = x.reshape(-1, input_size)
        return method.apply(layer, flat, bias, x.dtype).view(*x.shape[:-1], output_size)


CONVERSIONS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.double)
