"""The layers on the C++ library: packed weights, bfloat16, float32 or quantized, and its elementwise kernels.

Made by the worker with its runtime. Weights live on huge pages, in the order in which kernels stream them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native import causal_conv, delta_net, elementwise, linear, quant, rows, state_space
from quire.kernels.native.arena import HugeArena
from quire.kernels.native.block_quant import BLOCK_KERNELS
from quire.kernels.native.coded import CODES
from quire.kernels.native.int8_codes import pack_codes
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch
from quire.layers.experts import ExpertKernels, ExpertsMethod
from quire.layers.head_linear import HeadLinearMethod
from quire.layers.kernels import LayerKernels
from quire.layers.linear_method import LinearMethod
from quire.layers.native_as_stored import AsStoredExperts, AsStoredMethod
from quire.layers.native_blocks import BlockLinearMethod
from quire.layers.native_coded import ONLINE_FORMATS, CodedExperts, CodedLinearMethod
from quire.layers.native_experts import NativeExpertKernels, PackedExperts
from quire.layers.native_heads import PackedHeads
from quire.layers.native_weight import NativeLinearMethod, PackedWeight, packed_weight
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import WeightTarget

# To be raised with every change of a packed layout: packed weights on disk are then made anew.
PACKING_VERSION = 2
# What checkpoints have that the format of `quant.INT8` can hold.
INT8_ROWS = WeightFormat("int8")


class PackedRows(WeightTarget):
    """Rows of a packed weight.

    Args:
        pack: writes them and says whether they are finite.
        unpack: reads them back.
        pack_codes: writes those of a checkpoint in eight bits, with a scale for each row, as they are.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        pack: Callable[[torch.Tensor], bool],
        unpack: Callable[[], torch.Tensor],
        pack_codes: Callable[[Mapping[str, torch.Tensor]], bool] | None = None,
    ) -> None:
        self.shape = shape
        self._pack = pack
        self._unpack = unpack
        self._pack_codes = pack_codes

    def load(self, tensor: torch.Tensor) -> bool:
        """Pack; a matrix that the checkpoint has transposed is copied."""
        return self._pack(tensor if tensor.stride(-1) == 1 else tensor.contiguous())

    def load_stored(self, weight: StoredWeight) -> bool:
        """Pack the codes, or the numbers that they mean."""
        if self._pack_codes is not None and weight.format == INT8_ROWS:
            return self._pack_codes(weight.parts)
        return super().load_stored(weight)

    def stored(self) -> torch.Tensor:
        """Unpack."""
        return self._unpack()


@dataclass(frozen=True)
class PackedLinearMethod(NativeLinearMethod):
    """Weights in the model's type, as panels of 16 outputs."""

    def allocate(self, output_size: int, input_size: int, dtype: torch.dtype) -> PackedWeight:
        """Panels of the dtype."""
        packed = self.arena.zeros(linear.packed_shape(output_size, input_size, dtype), dtype)
        return PackedWeight(packed, torch.empty(0), output_size, input_size)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """Packs the rows where they belong."""
        weight = packed_weight(layer)
        return PackedRows(
            (num_rows, weight.input_size),
            lambda rows: linear.pack_rows(self.runtime, rows, weight.packed, first_row),
            lambda: linear.unpack_rows(self.runtime, weight.packed, weight.input_size, first_row, num_rows),
        )

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply."""
        weight = packed_weight(layer)
        return linear.linear(self.runtime, x, weight.packed, weight.output_size, bias, out_dtype=out_dtype)

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Multiply."""
        weight = packed_weight(layer)
        linear.linear(self.runtime, x, weight.packed, weight.output_size, bias, out_dtype=out.dtype, out=out)

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        weight = packed_weight(layer)
        size = weight.output_size // 2
        if size % linear.PANEL_SIZE:
            return super().apply_gated(layer, x, bias)
        return linear.gated_linear(self.runtime, x, weight.packed, size, bias)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Unpack the rows."""
        weight = packed_weight(layer)
        return linear.gather_rows(self.runtime, row_ids, weight.packed, weight.input_size)


@dataclass(frozen=True)
class QuantizedLinearMethod(NativeLinearMethod):
    """Integer weights with scales; activations are quantized to int8 per token.

    Attributes:
        format: of the weights.
        dtype: of activations, and of rows looked up.
    """

    format: quant.QuantFormat
    dtype: torch.dtype

    def allocate(self, output_size: int, input_size: int, dtype: torch.dtype) -> PackedWeight:
        """Integers and scales."""
        packed = self.arena.zeros(self.format.packed_shape(output_size, input_size), quant.PACKED_DTYPE)
        scales = self.arena.zeros(self.format.scales_shape(output_size, input_size), self.format.scale_dtype)
        return PackedWeight(packed, scales, output_size, input_size)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """Quantizes the rows where they belong."""
        weight = packed_weight(layer)
        packed, scales, input_size = weight.packed, weight.scales, weight.input_size
        return PackedRows(
            (num_rows, input_size),
            lambda rows: self.format.pack_rows(self.runtime, rows, packed, scales, first_row),
            lambda: self.format.unpack_rows(self.runtime, packed, scales, input_size, first_row, num_rows),
            (lambda parts: pack_codes(parts["codes"], parts["scales"][:, 0].contiguous(), packed, scales, first_row))
            if self.format is quant.INT8
            else None,
        )

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Quantize the activations and multiply."""
        weight = packed_weight(layer)
        return self.format.linear(
            self.runtime, x, weight.packed, weight.scales, weight.output_size, bias, out_dtype=out_dtype
        )

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Quantize the activations and multiply."""
        weight = packed_weight(layer)
        self.format.linear(
            self.runtime, x, weight.packed, weight.scales, weight.output_size, bias, out_dtype=out.dtype, out=out
        )

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        weight = packed_weight(layer)
        size = weight.output_size // 2
        if size % quant.PANEL_SIZE:
            return super().apply_gated(layer, x, bias)
        return self.format.gated_linear(self.runtime, x, weight.packed, weight.scales, size, bias)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows times their scales."""
        weight = packed_weight(layer)
        return self.format.gather_rows(
            self.runtime, row_ids, weight.packed, weight.scales, weight.input_size, self.dtype
        )


class NativeKernels(LayerKernels):
    """The C++ library on a CPU.

    Args:
        runtime: tier and threads.
        dtype: of activations: bfloat16 or float32.
        quantization: of the weights: None, "int8", "int4", or one of `coded.ONLINE_FORMATS`.
        is_as_stored: weights stay in the formats of a quantized checkpoint.
    """

    # The widest activations of a layer then stay in the third-level cache, and the allocator keeps their memory.
    rows_at_once = 1024

    def __init__(
        self,
        runtime: NativeRuntime,
        dtype: torch.dtype,
        quantization: str | None = None,
        *,
        is_as_stored: bool = False,
    ) -> None:
        self._runtime = runtime
        self._dtype = dtype
        self._quantization = quantization
        self._is_as_stored = is_as_stored
        self._arena = HugeArena()

    def as_stored(self) -> LayerKernels:
        """The same, unless weights are to be quantized otherwise."""
        if self._quantization is not None:
            return self
        return NativeKernels(self._runtime, self._dtype, is_as_stored=True)

    def packing(self) -> Mapping[str, str | int] | None:
        """All tiers share a layout. What stays as stored is packed about as fast as it is read."""
        if self._is_as_stored:
            return None
        return {"layout": PACKING_VERSION, "dtype": str(self._dtype), "quantization": self._quantization or "none"}

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """Packed, in the model's type or quantized."""
        if self._quantization == "int4":
            return QuantizedLinearMethod(self._runtime, self._arena, quant.INT4, self._dtype)
        if self._quantization is not None and self._quantization in ONLINE_FORMATS:
            return CodedLinearMethod(self._runtime, self._arena, *ONLINE_FORMATS[self._quantization])
        return self.table_method(output_size, input_size)

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """As projections, but no less than 8 bits, of integers: every token passes through it twice."""
        if self._quantization in ("int8", "int4"):
            return QuantizedLinearMethod(self._runtime, self._arena, quant.INT8, self._dtype)
        if self._is_as_stored:
            return AsStoredMethod(self._runtime, self._format_method)
        return self._format_method(None)

    def _format_method(self, weight_format: WeightFormat | None) -> LinearMethod:
        """How rows of a checkpoint's format are stored and multiplied; those without kernels as plain numbers."""
        if weight_format == INT8_ROWS:
            return QuantizedLinearMethod(self._runtime, self._arena, quant.INT8, self._dtype)
        if weight_format is not None and weight_format.name in BLOCK_KERNELS:
            return BlockLinearMethod(self._runtime, self._arena, BLOCK_KERNELS[weight_format.name], self._dtype)
        if weight_format is not None and weight_format.name in CODES and self._dtype == torch.bfloat16:
            return CodedLinearMethod(self._runtime, self._arena, weight_format)
        return PackedLinearMethod(self._runtime, self._arena)

    def dense_method(self) -> LinearMethod:
        """Packed, in the model's type."""
        return PackedLinearMethod(self._runtime, self._arena)

    def experts_method(self, output_size: int, input_size: int) -> ExpertsMethod:
        """One packed weight for all experts, stored as a projection's."""
        method = self.linear_method(output_size, input_size)
        if isinstance(method, AsStoredMethod):
            return AsStoredExperts(self._format_method, self._packed_experts, method)
        return self._packed_experts(method)

    def _packed_experts(self, method: LinearMethod) -> ExpertsMethod:
        if isinstance(method, BlockLinearMethod):
            return PackedExperts(self._runtime, method, method.kernel)
        if isinstance(method, CodedLinearMethod):
            return CodedExperts(method)
        return PackedExperts(
            self._runtime, method, method.format if isinstance(method, QuantizedLinearMethod) else None
        )

    def experts(self) -> ExpertKernels:
        """The native ones."""
        return NativeExpertKernels(self._runtime)

    def head_linear_method(self) -> HeadLinearMethod:
        """Packed, in the model's type."""
        return PackedHeads(self._runtime, self._arena)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One pass over the rows."""
        return elementwise.rms_norm(self._runtime, x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass; `residual` becomes the sum."""
        return elementwise.rms_norm(self._runtime, x, weight, eps, residual), residual

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """One pass over the rows."""
        return elementwise.layer_norm(self._runtime, x, weight, bias, eps)

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass; `residual` becomes the sum."""
        return elementwise.layer_norm(self._runtime, x, weight, bias, eps, residual), residual

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """One pass."""
        return elementwise.transform(self._runtime, x, addend=residual)

    def sum(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """One pass."""
        return elementwise.transform(self._runtime, x, addend=residual)

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copied."""
        return rows.take_rows(self._runtime, x, ids)

    def put_rows(self, x: torch.Tensor, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Copied."""
        return rows.put_rows(self._runtime, x, ids, num_rows)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """One pass."""
        return elementwise.transform(self._runtime, x, factor=factor)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """One pass."""
        return elementwise.transform(self._runtime, x, activation)

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """One pass."""
        return elementwise.activate_and_mul(self._runtime, x, activation)

    def multiply(self, x: torch.Tensor, gate: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """One pass."""
        return elementwise.multiply(self._runtime, x, gate, activation)

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        num_groups: int = 1,
        gate_first: bool = False,
    ) -> torch.Tensor:
        """One pass over the rows."""
        return elementwise.gated_rms_norm(
            self._runtime, x, gate, weight, eps, num_groups=num_groups, gate_first=gate_first
        )

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        has_silu: bool,
    ) -> torch.Tensor:
        """Over all requests at once."""
        return causal_conv.causal_conv(self._runtime, x, weight, bias, states, batch, has_silu=has_silu)

    def delta_gates(
        self, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass."""
        return delta_net.delta_gates(self._runtime, b, a, a_log, bias)

    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        num_key_heads: int,
        scale: float,
    ) -> torch.Tensor:
        """Token after token, over all requests and heads at once."""
        return delta_net.gated_delta_rule(
            self._runtime, qkv, decay, beta, states, batch, num_key_heads=num_key_heads, scale=scale
        )

    def mamba_scan(
        self,
        x: torch.Tensor,
        time_step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor | None,
        a: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
    ) -> torch.Tensor:
        """Token after token, over all requests and channels at once."""
        return state_space.mamba_scan(self._runtime, x, time_step, b, c, gate, a, skip, states, batch)

    def mamba2_scan(
        self,
        x: torch.Tensor,
        time_step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor | None,
        a: torch.Tensor,
        skip: torch.Tensor,
        time_step_bias: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        num_groups: int,
        time_step_range: tuple[float, float],
    ) -> torch.Tensor:
        """Token after token, over all requests and heads at once."""
        return state_space.mamba2_scan(
            self._runtime, x, time_step, b, c, gate, a, skip, time_step_bias, states, batch, num_groups=num_groups,
            time_step_range=time_step_range,
        )  # fmt: skip
