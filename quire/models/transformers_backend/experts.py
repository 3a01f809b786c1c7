"""Mixtures of experts: Quire's projections behind transformers' experts registry.

Classes that keep all experts of a layer as two tensors look up, by name, who multiplies by them; `mix` does, by the
kernels of Quire's own mixtures. Called by the classes' own modules; the weights belong to these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.kernels.routing import Routing
from quire.layers.experts import ExpertLinear
from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.transformers_backend.names import CheckpointNames

MIX = "quire"
EXPERTS = "quire_experts"
"""Name of the `Experts` within a module with experts."""


class Experts(nn.Module):
    """The projections of one layer's experts.

    Args:
        module: of transformers, with its parameters on the meta device.

    Attributes:
        first_name: what the class calls the first tensor of all experts.
        first, second: the projections; outputs of the first are gates and ups in one, where there are gates.
    """

    def __init__(self, module: nn.Module, options: LayerOptions) -> None:
        super().__init__()
        self.is_transposed = bool(module.is_transposed)
        self.operations = options.kernels.experts()
        self.first_name = "gate_up_proj" if module.has_gate else "up_proj"
        self.first = self._projection(module, self.first_name, options)
        self.second = self._projection(module, "down_proj", options)

    def _projection(self, module: nn.Module, name: str, options: LayerOptions) -> ExpertLinear:
        num_experts, rows, columns = module.get_parameter(name).shape
        if self.is_transposed:
            rows, columns = columns, rows
        method = options.kernels.experts_method(rows, columns)
        has_bias = bool(module.has_bias)
        return ExpertLinear(num_experts, columns, rows, method, options.dtype, options.device, bias=has_bias)

    def targets(self, name: str, names: CheckpointNames) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each tensor, and where it goes; `name` is that of the module with experts."""
        for own, linear in ((self.first_name, self.first), ("down_proj", self.second)):
            whole = f"{name}.{own}"
            if names.split_names(whole, 0):
                for expert in range(linear.num_experts):
                    yield from _rows(linear, expert, names.split_names(whole, expert))
            else:
                yield names.saved(whole), StackedTarget(linear, self.is_transposed)
            if linear.bias is not None:
                yield names.saved(f"{whole}_bias"), TensorTarget(linear.bias.data)


def _rows(linear: ExpertLinear, expert: int, names: list[str]) -> Iterator[tuple[str, WeightTarget]]:
    """Matrices whose rows follow each other in the projection of one expert."""
    num_rows = linear.output_size // len(names)
    for place, name in enumerate(names):
        yield name, linear.method.row_target(linear, expert, place * num_rows, num_rows)


class StackedTarget(WeightTarget):
    """One tensor for all experts.

    Args:
        is_transposed: its matrices are [input_size, output_size].
    """

    def __init__(self, linear: ExpertLinear, is_transposed: bool) -> None:
        row_target, num_rows = linear.method.row_target, linear.output_size
        self.targets = [row_target(linear, expert, 0, num_rows) for expert in range(linear.num_experts)]
        self.is_transposed = is_transposed
        sizes = (linear.input_size, num_rows) if is_transposed else (num_rows, linear.input_size)
        self.shape = (linear.num_experts, *sizes)

    def load(self, tensor: torch.Tensor) -> bool:
        """Divide."""
        parts = tensor.transpose(1, 2) if self.is_transposed else tensor
        return all(target.load(part.contiguous()) for target, part in zip(self.targets, parts, strict=True))

    def stored(self) -> torch.Tensor:
        """Put together again."""
        whole = torch.stack([target.stored() for target in self.targets])
        return whole.transpose(1, 2) if self.is_transposed else whole


def holds_experts(module: nn.Module) -> bool:
    """True for a module whose class transformers' registry of experts serves."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def mix(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of what each token's experts make of it, in the order of its choices.

    Args:
        hidden: [num_tokens, hidden_size].
        chosen, weights: [num_tokens, experts per token].
    """
    if hidden.is_meta:  # the probe, before weights are here
        first = module.gate_up_proj if module.has_gate else module.up_proj
        _activate(module, hidden.new_empty(len(hidden), first.shape[2 if module.is_transposed else 1]))
        return torch.empty_like(hidden)
    experts = module.get_submodule(EXPERTS)
    routing = routing_of(chosen, weights, experts.first.num_experts)
    output = experts.second(_activate(module, experts.first(hidden, routing, are_rows=False)), routing, are_rows=True)
    if module.has_post_expert_norm:
        output = module.post_expert_norm(output)
    combined: torch.Tensor = experts.operations.combine(output, routing.places, routing.weights, None, None)
    return combined


def routing_of(chosen: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
    """Where the rows of tokens lie whose experts a class chose; arguments as of `mix`."""
    order = torch.argsort(chosen.flatten(), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    return Routing(
        expert_ids=chosen.int(),
        weights=weights.float().contiguous(),
        starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        rows=(order // chosen.shape[1]).int(),
        places=places.view(chosen.shape).int(),
    )


def _activate(module: Any, inner: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return activated


def register() -> None:
    """Put `mix` into transformers' registry; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(MIX, mix)
