"""Mixtures of experts on the C++ library: one packed weight and one call for all experts. Made by `native`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config.model_arch import RouterArch
from quire.kernels.native import elementwise, experts, linear, quant
from quire.kernels.native.block_quant import BlockKernel
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.routing import Routing
from quire.layers.experts import ExpertKernels, ExpertLinear, ExpertsMethod, route_options
from quire.layers.linear_method import LinearMethod
from quire.layers.weight_target import WeightTarget


@dataclass(frozen=True)
class PackedExperts(ExpertsMethod):
    """The experts' outputs one behind the other, each from a panel of 16 on.

    Attributes:
        runtime: tier and threads.
        method: stores the weight as that of one projection with the outputs of all experts.
        format: of quantized weights.
    """

    runtime: NativeRuntime
    method: LinearMethod
    format: quant.QuantFormat | BlockKernel | None

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Register `packed`, and `scales` where there are some."""
        num_outputs = layer.num_experts * experts.outputs_of_expert(layer.output_size)
        self.method.create_weights(layer, num_outputs, layer.input_size, dtype, device)
        buffers = dict(layer.named_buffers())
        # To look a buffer up takes as long as a kernel.
        layer.__dict__["packed_experts"] = (buffers["packed"], buffers.get("scales"))

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """Packs the rows where they belong."""
        first_output = expert * experts.outputs_of_expert(layer.output_size)
        return self.method.row_target(layer, first_output + first_row, num_rows)

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Multiply."""
        return self._product(layer, x, rows, starts, layer.output_size, is_gated=False)

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        size = layer.output_size // 2
        if size % linear.PANEL_SIZE:
            return elementwise.silu_and_mul(self.runtime, self.apply(layer, x, rows, starts))
        return self._product(layer, x, rows, starts, size, is_gated=True)

    def _product(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor, output_size: int,
        *, is_gated: bool,
    ) -> torch.Tensor:  # fmt: skip
        packed, scales = layer.__dict__["packed_experts"]
        return experts.grouped_linear(
            self.runtime, x, rows, starts, packed, output_size, layer.bias, scales=scales, format=self.format,
            is_gated=is_gated,
        )  # fmt: skip


class NativeExpertKernels(ExpertKernels):
    """Each operation one call.

    Args:
        runtime: tier and threads.
    """

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def route(
        self,
        logits: torch.Tensor,
        num_chosen: int,
        correction: torch.Tensor | None,
        router: RouterArch,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        """By the router's kernel."""
        return experts.route(
            self._runtime, logits, num_chosen, correction, expert_scales=expert_scales, **route_options(router)
        )

    def arrange(self, routing: Routing, slots: torch.Tensor) -> Routing:
        """One pass over the choices."""
        return experts.arrange(self._runtime, routing, slots)

    def combine(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor | None,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """One pass over the rows."""
        return experts.combine(self._runtime, rows, places, weights, shared, shared_gate)

    def spread(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """One pass over the rows."""
        return experts.spread(self._runtime, x, routing.places, routing.weights)

    def clamped_silu_and_mul(self, x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
        """One pass over the rows."""
        return elementwise.clamped_silu_and_mul(self._runtime, x, limit, alpha, offset)
