"""How checkpoints store the projections of experts. Called by mixtures of experts for their weight targets. Pure.

A family names the layout in `layouts["moe.experts"]`:

    each            tensors for each expert: `experts.3.gate_proj`, `up_proj`, `down_proj` (the default)
    stacked         `experts.gate_up_proj` [num_experts, gates then ups, hidden_size], and `experts.down_proj`; or
                    `each`, where the checkpoint has that
    interleaved     the same with gates and ups in turns (gpt-oss)

with ", transposed" behind it where matrices are [input_size, output_size], which those in MXFP4 never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from quire.config.model_arch import MoEArch
from quire.errors import ModelError
from quire.layers.experts import ExpertLinear
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import ReorderedTarget, TensorTarget, WeightTarget

EACH, STACKED, INTERLEAVED = "each", "stacked", "interleaved"
TRANSPOSED = "transposed"
Targets = Iterator[tuple[str, WeightTarget]]


class StackedTarget(WeightTarget):
    """Places of equal shape for the parts of one tensor.

    Args:
        parts: end of a name -> place, of the tensors that checkpoints may have instead.
    """

    def __init__(self, targets: Sequence[WeightTarget], parts: Mapping[str, WeightTarget] | None = None) -> None:
        self.targets = targets
        self.parts = parts or {}
        self.shape = (len(targets), *targets[0].shape)

    def load(self, tensor: torch.Tensor) -> bool:
        """One by one."""
        are_finite = [target.load(part) for target, part in zip(self.targets, tensor, strict=True)]
        return all(are_finite)

    def expect(self, weight_format: WeightFormat | None) -> None:
        """One by one."""
        for target in self.targets:
            target.expect(weight_format)

    def load_stored(self, weight: StoredWeight) -> bool:
        """One by one."""
        num_rows = weight.shape[0] // len(self.targets)
        are_finite = [
            target.load_stored(weight.rows(slice(i * num_rows, (i + 1) * num_rows)))
            for i, target in enumerate(self.targets)
        ]
        return all(are_finite)

    def stored(self) -> torch.Tensor:
        """One by one."""
        return torch.stack([target.stored() for target in self.targets])

    def in_parts(self, name: str) -> Mapping[str, WeightTarget]:
        """The tensors of each expert."""
        stem = name.rpartition(".")[0]
        return {f"{stem}.{end}": target for end, target in self.parts.items()}


def expert_targets(
    gate_up_proj: ExpertLinear, down_proj: ExpertLinear, name: str, arch: MoEArch, layouts: Mapping[str, str]
) -> Targets:
    """The weights and biases that checkpoints store under `name`."""
    layout, _, rest = layouts.get("moe.experts", EACH).partition(", ")
    if layout not in (EACH, STACKED, INTERLEAVED) or rest not in ("", TRANSPOSED):
        raise ModelError(f"{layouts['moe.experts']!r} is not a known layout of experts", field="layouts")
    shards = ("gate_proj", "up_proj") if arch.is_gated else ("up_proj",)
    parts = [dict(_of_each(gate_up_proj, shards)), dict(_of_each(down_proj, ("down_proj",)))]
    if layout == EACH:
        yield from ((f"{name}.{end}", target) for of_linear in parts for end, target in of_linear.items())
        return
    if layout == INTERLEAVED or rest or arch.has_bias:
        parts = [{}, {}]  # no checkpoints are known that have them apart
    order = None
    if layout == INTERLEAVED:
        order = torch.arange(gate_up_proj.output_size).view(-1, 2).t().flatten()
    merged = f"{name}.{'gate_up_proj' if arch.is_gated else 'up_proj'}"
    down = f"{name}.down_proj"
    is_transposed = bool(rest) and not arch.is_mxfp4
    yield from _stacked(gate_up_proj, merged, order, is_transposed, parts=parts[0])
    yield from _stacked(down_proj, down, None, is_transposed, parts=parts[1])


def _of_each(linear: ExpertLinear, shards: Sequence[str]) -> Targets:
    """End of the name and place of the tensors of each expert, whose outputs are those of the shards in order."""
    num_rows = linear.output_size // len(shards)
    for expert in range(linear.num_experts):
        for number, shard in enumerate(shards):
            first = number * num_rows
            yield f"{expert}.{shard}.weight", linear.method.row_target(linear, expert, first, num_rows)
            if linear.bias is not None:
                yield f"{expert}.{shard}.bias", TensorTarget(linear.bias.data[expert, first : first + num_rows])


def _stacked(
    linear: ExpertLinear,
    name: str,
    order: torch.Tensor | None,
    is_transposed: bool,
    *,
    parts: Mapping[str, WeightTarget],
) -> Targets:
    """One tensor for all experts.

    Args:
        order: [output_size] the stored row of each output; None = in order.
        parts: the weights of each expert, which checkpoints may have instead.
    """
    numbers = range(linear.num_experts)
    targets = [linear.method.row_target(linear, expert, 0, linear.output_size) for expert in numbers]
    yield name, StackedTarget([ReorderedTarget(target, order, is_transposed) for target in targets], parts)
    if linear.bias is not None:
        biases = [TensorTarget(linear.bias.data[expert]) for expert in numbers]
        yield f"{name}_bias", StackedTarget([ReorderedTarget(bias, order) for bias in biases])
