"""A format of weights: signs, and one scale for each output."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.linear_method import LinearMethod
from quire.layers.quantization import Quantization
from quire.layers.weight_target import WeightTarget


class Signs(Quantization):
    """One bit of each weight, as it were."""

    quire_contract = 1

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        return SignMethod()


class SignMethod(LinearMethod):
    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer.register_buffer("signs", torch.zeros(output_size, input_size, dtype=torch.int8, device=device))
        layer.register_buffer("scales", torch.zeros(output_size, 1, dtype=dtype, device=device))

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        rows = slice(first_row, first_row + num_rows)
        return SignRows(layer.get_buffer("signs")[rows], layer.get_buffer("scales")[rows])

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        weight = layer.get_buffer("signs").to(x.dtype) * layer.get_buffer("scales")
        return nn.functional.linear(x, weight, bias).to(out_dtype)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        signs, scales = layer.get_buffer("signs"), layer.get_buffer("scales")
        return signs[row_ids].to(scales.dtype) * scales[row_ids]


class SignRows(WeightTarget):
    def __init__(self, signs: torch.Tensor, scales: torch.Tensor) -> None:
        self.shape = tuple(signs.shape)
        self._signs, self._scales = signs, scales

    def load(self, tensor: torch.Tensor) -> bool:
        self._signs.copy_(tensor.sign())
        self._scales.copy_(tensor.float().abs().mean(1, keepdim=True))
        return bool(torch.isfinite(tensor).all())

    def stored(self) -> torch.Tensor:
        return self._signs.to(self._scales.dtype) * self._scales
