"""Weights of quantized checkpoints as codes with scales: 8-bit floats and integers, 4 bits with zero points, NF4.

Made by `native` for the formats of `coded.CODES`. Products take the codes; nothing is kept in a wider form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native import coded, elementwise, experts
from quire.kernels.native.arena import HugeArena
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import coded as reference
from quire.layers.experts import ExpertLinear, ExpertsMethod
from quire.layers.linear_method import LinearMethod
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import WeightTarget

Quantize = Callable[[torch.Tensor], StoredWeight]
# Rows of a weight that are quantized at a time.
ROWS_PER_QUANTIZING = 1024
NF4_GROUP_SIZE = 64


def quantize_fp8(rows: torch.Tensor) -> StoredWeight:
    """Each row by its largest magnitude."""
    codes, scales = reference.quantize_fp8(rows)
    return StoredWeight(WeightFormat("fp8"), (rows.shape[0], rows.shape[1]), {"codes": codes, "scales": scales})


def quantize_nf4(rows: torch.Tensor) -> StoredWeight:
    """Groups of 64 inputs by their largest magnitudes."""
    codes, scales = reference.quantize_nf4(rows, NF4_GROUP_SIZE)
    parts = {"codes": codes, "scales": scales}
    return StoredWeight(WeightFormat("nf4", NF4_GROUP_SIZE), (rows.shape[0], rows.shape[1]), parts)


ONLINE_FORMATS: Mapping[str, tuple[WeightFormat, Quantize]] = {
    "fp8": (WeightFormat("fp8"), quantize_fp8),
    "bitsandbytes": (WeightFormat("nf4", NF4_GROUP_SIZE), quantize_nf4),
}
"""Settings of `quantization` -> what plain weights become while they are loaded."""


@dataclass(slots=True)
class CodedLayer:
    """A layer's weight.

    Attributes:
        order: [input_size] int32 of the columns; None = in order.
    """

    weight: coded.CodedWeight
    output_size: int
    order: torch.Tensor | None = None


class CodedRows(WeightTarget):
    """Rows of a weight that is kept as codes.

    Args:
        quantize: makes codes of plain numbers; None = these are not expected.
    """

    def __init__(
        self, runtime: NativeRuntime, layer: CodedLayer, first_row: int, num_rows: int, quantize: Quantize | None
    ) -> None:
        self.shape = (num_rows, layer.weight.input_size)
        self._runtime = runtime
        self._layer = layer
        self._first_row = first_row
        self._quantize = quantize

    def load(self, tensor: torch.Tensor) -> bool:
        """Quantize."""
        assert self._quantize is not None, "the checkpoint's entry has a format"
        are_finite = [
            self._pack(self._quantize(tensor[row : row + ROWS_PER_QUANTIZING]), self._first_row + row)
            for row in range(0, len(tensor), ROWS_PER_QUANTIZING)
        ]
        return all(are_finite)

    def load_stored(self, weight: StoredWeight) -> bool:
        """Pack the codes as they are."""
        if weight.input_order is not None:
            order = weight.input_order.int()
            if self._layer.order is None:
                self._layer.order = order
            assert torch.equal(self._layer.order, order), "weights of another order are segments of their own"
        return self._pack(weight, self._first_row)

    def _pack(self, weight: StoredWeight, first_row: int) -> bool:
        parts = weight.parts
        codes = parts["codes"] if parts["codes"].stride(-1) == 1 else parts["codes"].contiguous()
        scales = parts["scales"].float().contiguous()
        return coded.pack_rows(self._runtime, self._layer.weight, codes, scales, parts.get("zeros"), first_row)

    def stored(self) -> torch.Tensor:
        """What the codes mean."""
        ids = torch.arange(self._first_row, self._first_row + self.shape[0])
        values = coded.gather_rows(self._runtime, ids, self._layer.weight, torch.float32)
        if self._layer.order is not None:
            values = values[:, torch.argsort(self._layer.order)]
        return values


@dataclass(frozen=True)
class CodedLinearMethod(LinearMethod):
    """Codes with scales, multiplied by bfloat16 activations as they are.

    Attributes:
        runtime: tier and threads.
        arena: where weights live.
        format: of the codes.
        quantize: makes such codes of plain numbers, where that is asked for.
    """

    runtime: NativeRuntime
    arena: HugeArena
    format: WeightFormat
    quantize: Quantize | None = None

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `packed`, `scales` and, where there are some, `zeros`."""
        code = coded.CODES[self.format.name]
        weight = coded.make_weight(code, output_size, input_size, self.format.group_size, self.arena.zeros)
        layer.register_buffer("packed", weight.packed)
        layer.register_buffer("scales", weight.scales)
        if weight.zeros is not None:
            layer.register_buffer("zeros", weight.zeros)
        layer.__dict__["coded"] = CodedLayer(weight, output_size)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """Packs the rows where they belong."""
        return CodedRows(self.runtime, coded_layer(layer), first_row, num_rows, self.quantize)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply."""
        own = coded_layer(layer)
        return coded.linear(
            self.runtime, x, own.weight, own.output_size, bias, order=own.order, out_dtype=out_dtype
        )  # fmt: skip

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Multiply."""
        own = coded_layer(layer)
        coded.linear(
            self.runtime, x, own.weight, own.output_size, bias, order=own.order, out_dtype=out.dtype, out=out
        )  # fmt: skip

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        own = coded_layer(layer)
        size = own.output_size // 2
        if size % coded.PANEL_SIZE:
            return elementwise.silu_and_mul(self.runtime, self.apply(layer, x, bias, x.dtype))
        return coded.linear(self.runtime, x, own.weight, size, bias, order=own.order, is_gated=True)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """The numbers that codes mean."""
        own = coded_layer(layer)
        values = coded.gather_rows(self.runtime, row_ids, own.weight, torch.bfloat16)
        return values if own.order is None else values[:, torch.argsort(own.order)]


@dataclass(frozen=True)
class CodedExperts(ExpertsMethod):
    """The experts' outputs one behind the other, each from a panel of 16 on, in one weight.

    Attributes:
        method: stores the weight as that of one projection with the outputs of all experts.
    """

    method: CodedLinearMethod

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """As the method."""
        num_outputs = layer.num_experts * experts.outputs_of_expert(layer.output_size)
        self.method.create_weights(layer, num_outputs, layer.input_size, dtype, device)

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """Packs the rows where they belong."""
        first_output = expert * experts.outputs_of_expert(layer.output_size)
        return self.method.row_target(layer, first_output + first_row, num_rows)

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Multiply."""
        return coded.grouped_linear(
            self.method.runtime, x, rows, starts, coded_layer(layer).weight, layer.output_size, layer.bias
        )

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        size, runtime = layer.output_size // 2, self.method.runtime
        if size % coded.PANEL_SIZE:
            return elementwise.silu_and_mul(runtime, self.apply(layer, x, rows, starts))
        return coded.grouped_linear(
            runtime, x, rows, starts, coded_layer(layer).weight, size, layer.bias, is_gated=True
        )  # fmt: skip


def coded_layer(layer: nn.Module) -> CodedLayer:
    """What `create_weights` made for a layer."""
    own = layer.__dict__["coded"]
    assert isinstance(own, CodedLayer)
    return own
