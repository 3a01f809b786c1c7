"""The feed-forward network of dense layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.attention.context import ForwardContext
from quire.config.model_arch import MLPArch
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.weight_target import WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.tensor_layouts import layout_of, linear_targets, merged_targets


class MLPPart(Part):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))).

    Attributes:
        gate_up_proj: gates, then ups; without gates ups alone.
        factors: on the outputs of `gate_up_proj`; None = ones.
        widths: of the intermediate size, what each rank computes; None = all of it.
    """

    def __init__(self, build: BuildContext, arch: MLPArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, hidden_size, size = build.options, build.arch.hidden_size, arch.intermediate_size
        self.arch = arch
        self.kernels = options.kernels
        self.layouts = build.family.layouts
        num_outputs = (2 if arch.is_gated else 1) * size
        shards = options.kernels.shards
        self.shards = shards
        self.widths = None if shards is None else shards.widths(size)
        own, method = size, None
        if shards is not None and self.widths is not None:
            first, end = shards.own_range(self.widths)
            ranges = tuple((begin + first, begin + end) for begin in range(0, num_outputs, size))
            own, method = end - first, options.kernels.own_rows(ranges, num_outputs, hidden_size)
        self.gate_up_proj = Linear(hidden_size, num_outputs, bias=arch.has_bias, options=options, method=method)
        self.down_proj = Linear(size, hidden_size, bias=arch.has_bias, options=options)
        self.output_norm = None if arch.output_norm is None else Norm(hidden_size, arch.output_norm, options=options)
        self.factors: torch.Tensor | None = None
        if arch.gate_scale != 1.0:
            ones = torch.ones(2 * own, dtype=options.dtype, device=options.device)
            self.factors = torch.cat((ones[:own] * arch.gate_scale, ones[own:]))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        output = self._by_rows(x, self.kernels.rows_at_once) if len(x) > self.kernels.rows_at_once else self._rows(x)
        if self.output_norm is not None:
            output = self.output_norm(output)
        return output if self.arch.output_scale == 1.0 else self.kernels.scale(output, self.arch.output_scale)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self._activated(x))
        return output

    def _by_rows(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Some rows after the other: what the first product writes is still in cache when the second reads it."""
        output = torch.empty(len(x), self.down_proj.output_size, dtype=x.dtype, device=x.device)
        for rows, out in zip(torch.split(x, num_rows), torch.split(output, num_rows), strict=True):
            self.down_proj.forward_into(self._activated(rows), out)
        return output

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        own = self._own_activated(x)
        return own if self.shards is None or self.widths is None else self.shards.all_gather(own, self.widths)

    def _own_activated(self, x: torch.Tensor) -> torch.Tensor:
        activation = self.arch.activation
        if not self.arch.is_gated:
            return self.kernels.activate(self.gate_up_proj(x), activation)
        if self.factors is not None:
            scaled = self.kernels.multiply(self.gate_up_proj(x), self.factors)
            return self.kernels.activate_and_mul(scaled, activation)
        if activation == "silu" and (self.shards is None or self.widths is not None):
            return self.gate_up_proj.forward_gated(x)
        return self.kernels.activate_and_mul(self.gate_up_proj(x), activation)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        _, is_transposed = layout_of(self.layouts, "mlp.down_proj")
        if self.arch.is_gated:
            sizes = dict.fromkeys(("gate_proj", "up_proj"), self.arch.intermediate_size)
            yield from merged_targets(self.gate_up_proj, name, "gate_up_proj", sizes, self.layouts)
        else:
            yield from linear_targets(self.gate_up_proj, f"{name}.up_proj", is_transposed=is_transposed)
        yield from linear_targets(self.down_proj, f"{name}.down_proj", is_transposed=is_transposed)
        if self.output_norm is not None:
            yield from self.output_norm.targets(f"{name}.output_norm")
