"""What mixtures of experts compute with: `ExpertLinear`, a projection for each expert, and `ExpertKernels`.

Both are chosen by the layers' kernels; here they are plain torch. An `ExpertsMethod`, which says how weights are stored
and multiplied, holds no tensors: those are parameters, buffers or modules of its layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import nn

from quire.config.model_arch import RouterArch
from quire.kernels.reference import experts as reference
from quire.kernels.reference.activation import clamped_silu_and_mul, silu_and_mul
from quire.kernels.routing import Routing
from quire.layers.linear_method import LinearMethod
from quire.layers.weight_target import WeightTarget


class ExpertsMethod(ABC):
    """How the weights [num_experts, output_size, input_size] of a layer are stored and applied.

    The rows of a product are those of all experts, sorted by expert (`kernels.routing`): row i is made of x[rows[i]],
    or of x[i] where `rows` is None. A row's result does not depend on the others.
    """

    @abstractmethod
    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Register the storage on `layer`; `dtype` is that of its inputs and outputs."""

    @abstractmethod
    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """Where the checkpoint's rows of some outputs of an expert go: shape [num_rows, input_size]."""

    @abstractmethod
    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Multiply and add the biases: [num_rows, output_size]."""

    @abstractmethod
    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """silu(gates) * ups, of experts whose outputs are gates, then as many ups: [num_rows, output_size / 2]."""


class ExpertLinear(nn.Module):
    """A projection for each expert.

    Args:
        dtype: of inputs and outputs.

    Attributes:
        bias: [num_experts, output_size], or None.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        method: ExpertsMethod,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.input_size = input_size
        self.output_size = output_size
        self.method = method
        method.create_weights(self, dtype, device)
        own_bias = torch.empty(num_experts, output_size, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if own_bias is None else nn.Parameter(own_bias, requires_grad=False))

    def forward(self, x: torch.Tensor, routing: Routing, *, are_rows: bool) -> torch.Tensor:
        """[num_rows, output_size] of `x`, which has one row for each token, or the rows already."""
        return self.method.apply(self, x, None if are_rows else routing.rows, routing.starts)

    def forward_gated(self, x: torch.Tensor, routing: Routing, *, are_rows: bool) -> torch.Tensor:
        """silu(gates) * ups: [num_rows, output_size / 2]."""
        return self.method.apply_gated(self, x, None if are_rows else routing.rows, routing.starts)


class LoopedExperts(ExpertsMethod):
    """A module of its own for each expert, one after the other.

    Args:
        method: how each expert's weight is stored and multiplied.
    """

    def __init__(self, method: LinearMethod) -> None:
        self._method = method

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Register `experts`."""
        layer.experts = nn.ModuleList(nn.Module() for _ in range(layer.num_experts))
        for expert in layer.experts:
            self._method.create_weights(expert, layer.output_size, layer.input_size, dtype, device)

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """The module's."""
        return self._method.row_target(_modules(layer)[expert], first_row, num_rows)

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Expert by expert."""
        modules = _modules(layer)

        def linear_of(expert: int, own: torch.Tensor) -> torch.Tensor:
            bias = None if layer.bias is None else layer.bias[expert]
            return self._method.apply(modules[expert], own, bias, own.dtype)

        return reference.grouped_linear(x, rows, starts, linear_of, layer.output_size)

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """The product, then the gates."""
        return silu_and_mul(self.apply(layer, x, rows, starts))


def _modules(layer: ExpertLinear) -> nn.ModuleList:
    modules = layer.experts
    assert isinstance(modules, nn.ModuleList)
    return modules


ComputeRows = Callable[[torch.Tensor, Routing, bool], torch.Tensor]
"""Of vectors, which have one row for each token, or the rows already, the rows of the experts: a row for a row."""


class ExpertKernels:
    """The operations of mixtures of experts besides their products; a token's result depends on no other token."""

    def route(
        self,
        logits: torch.Tensor,
        num_chosen: int,
        correction: torch.Tensor | None,
        router: RouterArch,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        """Choose the experts of every token; of equal scores the lower expert comes first.

        Args:
            logits: [num_tokens, num_experts] float32.
            num_chosen: experts of a token.
            correction: [num_experts] float32, added to the scores for the choice alone.
            expert_scales: [num_experts] float32: factor on the weights of each expert.
        """
        return reference.route(logits, num_chosen, correction, expert_scales=expert_scales, **route_options(router))

    def arrange(self, routing: Routing, slots: torch.Tensor) -> Routing:
        """The routing with rows sorted by other numbers of the experts: `slots`, [num_experts] int32."""
        return reference.arrange(routing, slots)

    def on_all_ranks(self, x: torch.Tensor, routing: Routing, are_rows: bool, compute: ComputeRows) -> torch.Tensor:
        """The rows of all experts, `compute(x, routing, are_rows)`, of which other ranks may compute some."""
        return compute(x, routing, are_rows)

    def combine(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor | None,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum of each token's rows times their weights, in the order of its choices, then of `shared`.

        Args:
            rows: [num_tokens * num_chosen, size].
            places: [num_tokens, num_chosen]: the row of each choice.
            weights: [num_tokens, num_chosen] float32; None = ones.
            shared: [num_tokens, size]: what all tokens passed through.
            shared_gate: [num_tokens, 1] float32: `shared` is multiplied by its sigmoid.
        """
        return reference.combine(rows, places, weights, shared, shared_gate)

    def spread(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The rows of all experts, each its token's vector times the weight: [num_tokens * num_chosen, size]."""
        return reference.spread(x, routing.places, routing.weights)

    def clamped_silu_and_mul(self, x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
        """Gate * sigmoid(alpha * gate) * (up + offset), cut at `limit`: [num_rows, 2 * size] -> [num_rows, size]."""
        return clamped_silu_and_mul(x, limit, alpha, offset)


class RouteOptions(TypedDict):
    """A router's settings as the kernels take them."""

    scoring: str
    is_normalized: bool
    scale: float
    num_groups: int
    num_chosen_groups: int
    group_score: str
    jitter: float


def route_options(router: RouterArch) -> RouteOptions:
    """The settings of `kernels.native.experts.route` and its reference."""
    return {
        "scoring": router.scoring,
        "is_normalized": router.is_normalized,
        "scale": router.scale,
        "num_groups": router.num_groups,
        "num_chosen_groups": router.num_chosen_groups,
        "group_score": router.group_score,
        "jitter": router.jitter,
    }
