"""How checkpoints store projections that this program fuses in another order: which stored row each of our rows is.

Called by the parts of a model for their weight targets. Pure. A family names the layout of a module in `layouts`:

    shards          a tensor for each projection (the default)
    concatenated    one tensor, the projections' rows one after the other
    by_head         one tensor, [head][query, key, value][element] (BLOOM, GPT-NeoX)
    by_group        one tensor, [key/value head][its queries, key, value][element] (Falcon); of Gated DeltaNet, with its
                    values and gates behind a head's query and key (Qwen3-Next)

with ", transposed" behind it where matrices are [input_size, output_size] (GPT-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from quire.config.model_arch import AttentionArch
from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.layers.rope import rows_of_halves
from quire.layers.weight_target import ReorderedTarget, SpreadTarget, TensorTarget, WeightTarget

SHARDS, CONCATENATED, BY_HEAD, BY_GROUP = "shards", "concatenated", "by_head", "by_group"
TRANSPOSED = "transposed"
Targets = Iterator[tuple[str, WeightTarget]]


def layout_of(layouts: Mapping[str, str], module: str) -> tuple[str, bool]:
    """The layout of a module within a layer, and whether its matrices are transposed."""
    layout, _, rest = layouts.get(module, SHARDS).partition(", ")
    if layout not in (SHARDS, CONCATENATED, BY_HEAD, BY_GROUP) or rest not in ("", TRANSPOSED):
        raise ModelError(f"{layouts[module]!r} is not a known layout of {module}", field="layouts")
    return layout, rest == TRANSPOSED


def linear_targets(
    linear: Linear,
    name: str,
    rows: torch.Tensor | None = None,
    *,
    first_row: int = 0,
    num_rows: int | None = None,
    is_transposed: bool = False,
) -> Targets:
    """The weight and bias that checkpoints store under `name`, for some rows of a projection.

    Args:
        rows: [num_rows] the stored row of each of them; None = in order.
        first_row, num_rows: which rows; None = all from there on.
    """
    count = linear.output_size - first_row if num_rows is None else num_rows
    targets = {"weight": linear.method.row_target(linear, first_row, count)}
    if linear.bias is not None:
        targets["bias"] = TensorTarget(linear.bias.data[first_row : first_row + count])
    for suffix, target in targets.items():
        is_plain = rows is None and not (is_transposed and suffix == "weight")
        yield f"{name}.{suffix}", target if is_plain else ReorderedTarget(target, rows, is_transposed)


def merged_targets(
    linear: Linear, name: str, merged_name: str, shard_sizes: Mapping[str, int], layouts: Mapping[str, str]
) -> Targets:
    """Projections of one input, stored as shards or concatenated.

    Args:
        name: of the module that they belong to.
        merged_name: of the tensor that holds them all, in checkpoints that have one.
        shard_sizes: the checkpoint's name of each projection -> its output size, in the order of the rows.
    """
    layout, is_transposed = layout_of(layouts, f"{name.rpartition('.')[2]}.{merged_name}")
    if layout == CONCATENATED:
        yield from linear_targets(linear, f"{name}.{merged_name}", is_transposed=is_transposed)
        return
    first_row = 0
    for shard, size in shard_sizes.items():
        yield from linear_targets(
            linear, f"{name}.{shard}", first_row=first_row, num_rows=size, is_transposed=is_transposed
        )
        first_row += size


def qkv_targets(linear: Linear, name: str, arch: AttentionArch, layouts: Mapping[str, str]) -> Targets:
    """Queries, keys and values: rows of all query heads, then of all key heads, then of all value heads.

    Output gates, where there are some, come before the queries; checkpoints store each behind its head's query.
    """
    layout, is_transposed = layout_of(layouts, f"{name.rpartition('.')[2]}.qkv_proj")
    num_heads, num_kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_size
    inner = rotated_rows(arch)
    if layout == SHARDS:
        num_stored = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        if arch.shares_cache_of is not None:
            num_stored = {"q_proj": num_heads}
        if arch.has_output_gate:
            num_stored["q_proj"] *= 2
        targets: dict[str, WeightTarget] = {}
        first_row = 0
        for shard, count in num_stored.items():
            order = None if inner is None or shard == "v_proj" else (_heads(count, size) + inner).flatten()
            if shard == "q_proj" and arch.has_output_gate:
                order = torch.arange(count * size).view(num_heads, 2, size).flip(1).transpose(0, 1).flatten()
            stored_name = f"{name}.k_proj" if shard == "v_proj" and arch.keys_are_values else f"{name}.{shard}"
            for full_name, target in linear_targets(
                linear, stored_name, order, first_row=first_row, num_rows=count * size, is_transposed=is_transposed
            ):
                keys = targets.get(full_name)
                targets[full_name] = target if keys is None else SpreadTarget((keys, target))
            first_row += count * size
        yield from targets.items()
        return
    rows = _stored_heads(layout, num_heads, num_kv_heads) * size
    elements = torch.arange(size).repeat(len(rows), 1)
    if inner is not None:
        elements[: num_heads + num_kv_heads] = inner
    order = (rows[:, None] + elements).flatten()
    is_in_order = bool((order[1:] > order[:-1]).all())
    yield from linear_targets(linear, f"{name}.qkv_proj", None if is_in_order else order, is_transposed=is_transposed)


def _stored_heads(layout: str, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """[num_heads + 2 * num_kv_heads] at which head each of our heads is stored: queries, keys, values."""
    if layout == CONCATENATED:
        return torch.arange(num_heads + 2 * num_kv_heads)
    if layout == BY_HEAD:
        return torch.arange(3 * num_heads).view(num_heads, 3).t().flatten()
    per_group = num_heads // num_kv_heads
    stored = torch.arange(num_kv_heads * (per_group + 2)).view(num_kv_heads, per_group + 2)
    return torch.cat([stored[:, :per_group].flatten(), stored[:, per_group], stored[:, per_group + 1]])


def rotated_rows(arch: AttentionArch) -> torch.Tensor | None:
    """[head_size] the stored row of each row of a head whose pairs are neighbours; None where they are not."""
    if arch.rope is None or not arch.rope.is_interleaved:
        return None
    return rows_of_halves(1, arch.head_size, arch.rope.rotary_dim)


def _heads(count: int, size: int) -> torch.Tensor:
    """[count, 1] first row of each head."""
    return torch.arange(count)[:, None] * size
