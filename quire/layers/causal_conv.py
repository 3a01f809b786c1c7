"""CausalConv: a convolution of each channel over its newest inputs, as recurrent layers have it before they mix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.kernels.recurrent import RecurrentBatch
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget


class CausalConv(nn.Module):
    """Its state is the `conv_size - 1` inputs before the step, in the model's dtype: see `state_shape`.

    Args:
        has_silu: apply SiLU to the result.
    """

    bias: nn.Parameter | None

    def __init__(self, channels: int, conv_size: int, *, bias: bool, has_silu: bool, options: LayerOptions) -> None:
        super().__init__()
        self.weight = options.parameter(conv_size, channels)  # the newest input's last: channels side by side
        self.register_parameter("bias", options.parameter(channels) if bias else None)
        self.has_silu = has_silu
        self.state_shape = (conv_size - 1, channels)
        self.kernels = options.kernels

    def forward(self, x: torch.Tensor, states: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        """[num_tokens, channels] -> [num_tokens, channels]; `states` [num_blocks, *state_shape] are moved."""
        return self.kernels.causal_conv(x, self.weight, self.bias, states, batch, has_silu=self.has_silu)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each of this layer's tensors, and where it goes; `name` is the layer's."""
        yield f"{name}.weight", ChannelsFirstTarget(self.weight.data)
        if self.bias is not None:
            yield f"{name}.bias", TensorTarget(self.bias.data)


class ChannelsFirstTarget(WeightTarget):
    """A convolution's weight [conv_size, channels], which checkpoints store as [channels, 1, conv_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.shape = (weight.shape[1], 1, weight.shape[0])

    def load(self, tensor: torch.Tensor) -> bool:
        """Transpose."""
        self._weight.copy_(tensor.squeeze(1).t())
        return bool(self._weight.isfinite().all())

    def stored(self) -> torch.Tensor:
        """As the checkpoint has it."""
        return self._weight.t().unsqueeze(1)
