"""Mixtures of experts: a router, the experts' MLPs, and an MLP that every token passes through."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.model_arch import MLPArch, MoEArch
from quire.kernels.routing import Routing
from quire.layers.experts import ExpertLinear
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.expert_layouts import expert_targets
from quire.models.interfaces import BuildContext
from quire.models.parts.mlp import MLPPart
from quire.models.parts.part import Part
from quire.models.tensor_layouts import linear_targets


class Router(nn.Module):
    """Chooses the experts of every token. Its weights are never quantized.

    Attributes:
        correction: added to the scores for the choice alone, in float32.
        expert_scales: factors on the experts' weights, in float32.
    """

    def __init__(self, build: BuildContext, arch: MoEArch) -> None:
        super().__init__()
        options, router = build.options, arch.router
        self.arch = arch
        self.kernels = options.kernels
        self.operations = options.kernels.experts()
        self.norm = None if router.norm is None else Norm(build.arch.hidden_size, router.norm, options=options)
        self.gate = Linear(
            build.arch.hidden_size, arch.num_experts, bias=router.has_bias, options=options,
            method=options.kernels.dense_method(),
        )  # fmt: skip
        self.correction: nn.Parameter | None = None
        self.expert_scales: nn.Parameter | None = None
        if router.has_correction:
            self.correction = _numbers(arch.num_experts, options.device)
        if router.has_expert_scales:
            self.expert_scales = _numbers(arch.num_experts, options.device)

    def forward(self, x: torch.Tensor) -> Routing:
        """[num_tokens, hidden_size] -> the experts of each token."""
        router = self.arch.router
        given = x if self.norm is None else self.norm(x)
        logits = self.gate.method.apply(self.gate, given, self.gate.bias, torch.float32)
        if router.logit_scale != 1.0:
            logits = self.kernels.scale(logits, router.logit_scale)
        return self.operations.route(logits, self.arch.num_chosen, self.correction, router, self.expert_scales)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each tensor, and where it goes."""
        yield from linear_targets(self.gate, name)
        if self.correction is not None:
            yield f"{name}.correction", TensorTarget(self.correction.data)
        if self.expert_scales is not None:
            yield f"{name}.expert_scales", TensorTarget(self.expert_scales.data, neutral=1.0)
        if self.norm is not None:
            yield from self.norm.targets(f"{name}.norm")


class Experts(nn.Module):
    """down(activation(gate(x)) * up(x)) of each expert for its own rows, or down(activation(up(x))).

    Attributes:
        gate_up_proj: gates, then ups; without gates ups alone.
    """

    def __init__(self, build: BuildContext, arch: MoEArch) -> None:
        super().__init__()
        options = build.options
        self.arch = arch
        self.kernels = options.kernels
        self.operations = options.kernels.experts()
        size, outputs = arch.latent_size or build.arch.hidden_size, arch.intermediate_size

        def projection(input_size: int, output_size: int) -> ExpertLinear:
            method = options.kernels.experts_method(output_size, input_size)
            return ExpertLinear(
                arch.num_experts, input_size, output_size, method, options.dtype, options.device, bias=arch.has_bias
            )

        self.gate_up_proj = projection(size, 2 * outputs if arch.is_gated else outputs)
        self.down_proj = projection(outputs, size)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[num_tokens, size] -> [num_tokens * num_chosen, size]: the rows of all experts."""
        are_rows = self.arch.router.weighs_input
        given = self.operations.spread(x, routing) if are_rows else x
        return self.operations.on_all_ranks(given, routing, are_rows, self._rows)

    @property
    def input_size(self) -> int:
        """Of the vectors."""
        return self.gate_up_proj.input_size

    def _rows(self, x: torch.Tensor, routing: Routing, are_rows: bool) -> torch.Tensor:
        return self.down_proj.forward(self._activated(x, routing, are_rows), routing, are_rows=True)

    def _activated(self, x: torch.Tensor, routing: Routing, are_rows: bool) -> torch.Tensor:
        arch = self.arch
        if arch.is_gated and arch.activation == "silu" and not arch.clamp:
            return self.gate_up_proj.forward_gated(x, routing, are_rows=are_rows)
        projected = self.gate_up_proj.forward(x, routing, are_rows=are_rows)
        if arch.clamp:
            alpha, offset = (arch.swiglu_alpha, 1.0) if arch.swiglu_alpha else (1.0, 0.0)
            return self.operations.clamped_silu_and_mul(projected, arch.clamp, alpha, offset)
        if arch.is_gated:
            return self.kernels.activate_and_mul(projected, arch.activation)
        return self.kernels.activate(projected, arch.activation)


class MoEPart(Part):
    """The sum of a token's experts, each times its weight, and of the shared expert.

    Attributes:
        latent_in, latent_out: around the experts, where they work on a smaller projection.
    """

    def __init__(self, build: BuildContext, arch: MoEArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, hidden_size = build.options, build.arch.hidden_size
        self.arch = arch
        self.kernels = options.kernels
        self.operations = options.kernels.experts()
        self.layouts = build.family.layouts
        self.router = Router(build, arch)
        self.experts = Experts(build, arch)
        self.shared_expert: MLPPart | None = None
        self.shared_gate: Linear | None = None
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        if arch.shared_size:
            shared = MLPArch(intermediate_size=arch.shared_size, activation=arch.activation, is_gated=arch.is_gated)
            self.shared_expert = MLPPart(build, shared, layer_idx, f"{name}.shared_expert")
        if arch.has_shared_gate:
            self.shared_gate = Linear(
                hidden_size, 1, bias=False, options=options, method=options.kernels.dense_method()
            )
        if arch.latent_size:
            self.latent_in = Linear(hidden_size, arch.latent_size, bias=False, options=options)
            self.latent_out = Linear(arch.latent_size, hidden_size, bias=False, options=options)
        self.takes_stream = arch.input_norm is not None
        self.input_norm = None if arch.input_norm is None else Norm(hidden_size, arch.input_norm, options=options)
        self.output_norm = None if arch.output_norm is None else Norm(hidden_size, arch.output_norm, options=options)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        routing = self.router(x)
        if self.input_norm is not None:
            x = self.input_norm(x)
        output = self._mixed(x, routing, positions, context)
        return output if self.output_norm is None else self.output_norm(output)

    def _mixed(
        self, x: torch.Tensor, routing: Routing, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        weights = None if self.arch.router.weighs_input else routing.weights
        shared = None if self.shared_expert is None else self.shared_expert(x, positions, context)
        gate = None
        if self.shared_gate is not None:
            gate = self.shared_gate.method.apply(self.shared_gate, x, None, torch.float32)
        if self.latent_in is None or self.latent_out is None:
            return self.operations.combine(self.experts(x, routing), routing.places, weights, shared, gate)
        rows = self.experts(self.latent_in(x), routing)
        combined: torch.Tensor = self.latent_out(self.operations.combine(rows, routing.places, weights, None, None))
        return combined if shared is None else self.kernels.add(shared, combined)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from self.router.targets(f"{name}.router")
        yield from expert_targets(
            self.experts.gate_up_proj, self.experts.down_proj, f"{name}.experts", self.arch, self.layouts
        )
        if self.shared_expert is not None:
            yield from self.shared_expert.targets(f"{name}.shared_expert")
        for norm_name, norm in (("input_norm", self.input_norm), ("output_norm", self.output_norm)):
            if norm is not None:
                yield from norm.targets(f"{name}.{norm_name}")
        for part_name in ("shared_gate", "latent_in", "latent_out"):
            projection = getattr(self, part_name)
            if projection is not None:
                yield from linear_targets(projection, f"{name}.{part_name}")


def _numbers(count: int, device: torch.device) -> nn.Parameter:
    """Numbers of experts: float32 in models of any type, as the scores are."""
    return nn.Parameter(torch.empty(count, dtype=torch.float32, device=device), requires_grad=False)
