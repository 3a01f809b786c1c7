"""Mixtures of experts: Quire's projections behind transformers' experts registry.

Classes that keep all experts of a layer as two tensors look up, by name, who multiplies by them; `mix` does, expert by
expert, over the tokens that chose it. Called by the classes' own modules; the weights belong to these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.layers.options import LayerOptions
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.transformers_backend.linear import FlatLinear
from quire.models.transformers_backend.names import CheckpointNames

MIX = "quire"
EXPERTS = "quire_experts"
"""Name of the `Experts` within a module with experts."""


class Experts(nn.Module):
    """The projections of one layer's experts.

    Args:
        module: of transformers, with its parameters on the meta device.

    Attributes:
        inputs, outputs: of each expert; inputs are gates and ups in one, where there are gates.
    """

    def __init__(self, module: nn.Module, options: LayerOptions) -> None:
        super().__init__()
        self.has_gate, self.is_transposed = bool(module.has_gate), bool(module.is_transposed)
        self.first = "gate_up_proj" if self.has_gate else "up_proj"
        self.inputs = self._linears(module, self.first, options)
        self.outputs = self._linears(module, "down_proj", options)

    def _linears(self, module: nn.Module, name: str, options: LayerOptions) -> nn.ModuleList:
        num_experts, rows, columns = module.get_parameter(name).shape
        if self.is_transposed:
            rows, columns = columns, rows
        return nn.ModuleList(FlatLinear(columns, rows, bool(module.has_bias), options) for _ in range(num_experts))

    def targets(self, name: str, names: CheckpointNames) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each tensor, and where it goes; `name` is that of the module with experts."""
        for own, linears in ((self.first, _each(self.inputs)), ("down_proj", _each(self.outputs))):
            whole = f"{name}.{own}"
            if names.split_names(whole, 0):
                for expert, linear in enumerate(linears):
                    yield from _rows(linear, names.split_names(whole, expert))
            else:
                weights = [one.method.row_target(one, 0, one.output_size) for one in linears]
                yield names.saved(whole), StackedTarget(weights, self.is_transposed)
            biases = [TensorTarget(one.bias.data) for one in linears if one.bias is not None]
            if biases:
                yield names.saved(f"{whole}_bias"), StackedTarget(biases, False)


def _each(linears: nn.ModuleList) -> list[FlatLinear]:
    return [one for one in linears if isinstance(one, FlatLinear)]


def _rows(linear: FlatLinear, names: list[str]) -> Iterator[tuple[str, WeightTarget]]:
    """Matrices whose rows follow each other in one projection."""
    num_rows = linear.output_size // len(names)
    for place, name in enumerate(names):
        yield name, linear.method.row_target(linear, place * num_rows, num_rows)


class StackedTarget(WeightTarget):
    """One tensor for all experts.

    Args:
        targets: of each expert.
        is_transposed: its matrices are [input_size, output_size].
    """

    def __init__(self, targets: Sequence[WeightTarget], is_transposed: bool) -> None:
        self.targets = targets
        self.is_transposed = is_transposed
        shape = targets[0].shape
        self.shape = (len(targets), *(reversed(shape) if is_transposed else shape))

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
    if hidden.is_meta:
        return torch.empty_like(hidden)
    experts = module.get_submodule(EXPERTS)
    parts = hidden.new_empty(*chosen.shape, hidden.shape[1])
    for expert in torch.unique(chosen).tolist():
        tokens, places = torch.where(chosen == expert)
        inner = experts.inputs[expert](hidden[tokens])
        inner = module._apply_gate(inner) if experts.has_gate else module.act_fn(inner)
        parts[tokens, places] = experts.outputs[expert](inner)
    parts *= weights.unsqueeze(-1).to(parts.dtype)
    total = parts[:, 0]
    for place in range(1, parts.shape[1]):
        total = total + parts[:, place]
    return total


def register() -> None:
    """Put `mix` into transformers' registry; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(MIX, mix)
