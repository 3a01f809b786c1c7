"""Matrix products: `Linear`, and `MergedLinear` for projections that share their input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from quire.layers.linear_method import LinearMethod
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget


class Linear(nn.Module):
    """A projection of [num_tokens, input_size] to [num_tokens, output_size].

    Args:
        method: how the weight is stored; default: what the options' kernels choose.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        options: LayerOptions,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.method = method or options.kernels.linear_method(output_size, input_size)
        self.method.create_weights(self, output_size, input_size, options.dtype, options.device)
        self.register_parameter("bias", options.parameter(output_size) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, add the bias."""
        return self.method.apply(self, x, self.bias, x.dtype)

    def forward_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`forward` into `out` [num_tokens, output_size], whose rows may be strided."""
        self.method.apply_into(self, x, self.bias, out)

    def forward_gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gates) * ups, where the outputs are gates, then ups: [num_tokens, output_size / 2]."""
        return self.method.apply_gated(self, x, self.bias)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each of this layer's tensors, and where it goes; `name` is the layer's."""
        yield f"{name}.weight", self.method.row_target(self, 0, self.output_size)
        if self.bias is not None:
            yield f"{name}.bias", TensorTarget(self.bias.data)


class MergedLinear(Linear):
    """Several projections of one input, computed as one; checkpoints hold them apart.

    Args:
        shard_sizes: the checkpoint's name of each projection -> its output size, in the order of the rows.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        options: LayerOptions,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(input_size, sum(shard_sizes.values()), bias=bias, options=options, method=method)
        self.shard_sizes = dict(shard_sizes)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """Each projection's tensors, named as siblings of this layer."""
        parent, first_row = name.rpartition(".")[0], 0
        for shard, num_rows in self.shard_sizes.items():
            yield f"{parent}.{shard}.weight", self.method.row_target(self, first_row, num_rows)
            if self.bias is not None:
                yield f"{parent}.{shard}.bias", TensorTarget(self.bias.data[first_row : first_row + num_rows])
            first_row += num_rows
