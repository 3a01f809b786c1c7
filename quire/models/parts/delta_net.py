"""The Gated DeltaNet block: projections of queries, keys, values and gates, the layer's state, output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.attention.context import ForwardContext
from quire.config.recurrent_arch import GatedDeltaNetArch
from quire.core.kv_spec import KVCacheSpec
from quire.layers.gated_delta_net import GatedDeltaNet
from quire.layers.linear import Linear
from quire.layers.weight_target import ReorderedColumns, ReorderedTarget, WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.tensor_layouts import BY_GROUP, layout_of, linear_targets


class GatedDeltaNetPart(Part):
    """Linear attention with a state of constant size per request.

    Attributes:
        qkvz_proj: queries, keys, values, then the gates of the output.
        ba_proj: per value head, how much of a change is made, then how much of the state stays.
    """

    def __init__(self, build: BuildContext, arch: GatedDeltaNetArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, hidden_size, heads = build.options, build.arch.hidden_size, arch.num_value_heads
        values = heads * arch.value_size
        self.arch = arch
        self.layouts = build.family.layouts
        self.qkvz_proj = Linear(hidden_size, arch.conv_width + values, bias=False, options=options)
        # A few rows that decide over whole states: never quantized.
        dense = options.kernels.dense_method()
        self.ba_proj = Linear(hidden_size, 2 * heads, bias=False, options=options, method=dense)
        self.out_proj = Linear(values, hidden_size, bias=False, options=options)
        self.mixer = GatedDeltaNet(arch, build.cache_layers.add(name, self), options=options)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        width, heads = self.arch.conv_width, self.arch.num_value_heads
        qkvz, ba = self.qkvz_proj(x), self.ba_proj(x)
        mixed = self.mixer(qkvz[:, :width], qkvz[:, width:], ba[:, :heads], ba[:, heads:], context)
        output: torch.Tensor = self.out_proj(mixed)
        return output

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """The state of one request."""
        return self.mixer.kv_cache_spec(block_size)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        width, heads = self.arch.conv_width, self.arch.num_value_heads
        head_rows, value_rows, conv_rows = stored_value_rows(self.arch)
        if layout_of(self.layouts, "linear_attn.in_proj")[0] == BY_GROUP:
            yield from linear_targets(self.qkvz_proj, f"{name}.in_proj_qkvz", stored_qkvz_rows(self.arch))
        else:
            yield from linear_targets(self.qkvz_proj, f"{name}.in_proj_qkv", conv_rows, num_rows=width)
            yield from linear_targets(self.qkvz_proj, f"{name}.in_proj_z", value_rows, first_row=width)
        if BY_GROUP in (layout_of(self.layouts, f"linear_attn.{one}")[0] for one in ("in_proj", "in_proj_ba")):
            yield from linear_targets(self.ba_proj, f"{name}.in_proj_ba", stored_ba_rows(self.arch))
        else:
            yield from linear_targets(self.ba_proj, f"{name}.in_proj_b", head_rows, num_rows=heads)
            yield from linear_targets(self.ba_proj, f"{name}.in_proj_a", head_rows, first_row=heads)
        for target_name, target in linear_targets(self.out_proj, f"{name}.out_proj"):
            yield target_name, target if value_rows is None else ReorderedColumns(target, value_rows)
        of_heads = {f"{name}.A_log": head_rows, f"{name}.dt_bias": head_rows, f"{name}.conv1d.weight": conv_rows}
        for target_name, target in self.mixer.targets(name):
            rows = of_heads.get(target_name)
            yield target_name, target if rows is None else ReorderedTarget(target, rows)


def stored_value_rows(
    arch: GatedDeltaNetArch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]:
    """The stored place of each value head, of each row of values, and of each row of queries, keys and values.

    None where they are in order.
    """
    if not arch.values_are_tiled or arch.num_key_heads == arch.num_value_heads:
        return None, None, None
    heads = torch.arange(arch.num_value_heads).view(-1, arch.num_key_heads).t().flatten()
    values = (heads[:, None] * arch.value_size + torch.arange(arch.value_size)).flatten()
    first = arch.conv_width - len(values)
    return heads, values, torch.cat([torch.arange(first), first + values])


def stored_qkvz_rows(arch: GatedDeltaNetArch) -> torch.Tensor:
    """[conv_width + values] the stored row of each of ours: a key head's query, key, values and gates lie together."""
    keys, values = arch.key_size, arch.num_value_heads // arch.num_key_heads * arch.value_size
    stored = torch.arange(arch.num_key_heads * 2 * (keys + values)).view(arch.num_key_heads, -1)
    return torch.cat([part.flatten() for part in stored.tensor_split((keys, 2 * keys, 2 * keys + values), dim=1)])


def stored_ba_rows(arch: GatedDeltaNetArch) -> torch.Tensor:
    """[2 * num_value_heads] the stored row of each of ours: those of a key head lie together."""
    stored = torch.arange(2 * arch.num_value_heads).view(arch.num_key_heads, 2, -1)
    return stored.transpose(0, 1).flatten()
