"""Which layers share a block table: layers that keep the same blocks, in groups of equally many.

Called by planning. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.core.kv_spec import KVCacheGroupSpec, KVCacheSpec, MambaSpec
from quire.errors import UnsupportedError

MAX_GROUPS = 8
"""Most groups of a model: each costs the scheduler and the worker some time in every step."""

MAX_PADDING = 0.25
"""Most of a block's memory that may be unused: short requests, whose windows free nothing, pay for it, too."""

Kinds = dict[KVCacheSpec, list[str]]
"""The names of the layers that keep the same blocks."""
Groups = tuple[KVCacheGroupSpec, ...]


def group_layers(specs: Mapping[str, KVCacheSpec], max_model_len: int, *, frees_blocks: bool) -> tuple[Groups, str]:
    """Divide a model's layers into KV cache groups.

    Layers whose windows differ are divided so that a long decoding request takes the least memory, padding included;
    where no division of little padding takes less than one group that keeps everything does, it is that one. Layers
    with a state have groups of their own in any case.

    Args:
        specs: layer name -> what it needs.
        max_model_len: longest request, in tokens; a window as long is none.
        frees_blocks: False = every layer keeps all blocks, and windows are only masked.

    Returns:
        The groups, and what was decided for which reason.

    Raises:
        UnsupportedError: layers of attention differ in the shape of a block, a state is larger than their block,
            kinds do not divide into groups, or there are no layers.
    """
    specs = _of_one_page_size(specs)
    masked = _by_kind({name: spec.unwindowed() for name, spec in specs.items()})
    kinds = _by_kind({name: spec.within(max_model_len) for name, spec in specs.items()})
    one_group = _one_group(masked) if len(masked) == 1 else None
    if kinds.keys() == masked.keys():
        if one_group is not None:
            return one_group, "one group: no layer has a window shorter than max_model_len"
        return _divide(kinds, max_model_len, None)
    if not frees_blocks:
        reason = "disable_hybrid_kv_cache_manager is set: windows are masked, no block is freed early"
        if one_group is not None:
            return one_group, f"one group, {reason}"
        groups, division = _divide(masked, max_model_len, None)
        return groups, f"{division}; {reason}"
    if len(kinds) == 1:
        return _one_group(kinds), f"one group: {next(iter(kinds)).describe()}, blocks are freed behind it"
    return _divide(kinds, max_model_len, one_group)


def _divide(kinds: Kinds, max_model_len: int, one_group: Groups | None) -> tuple[Groups, str]:
    """The division that takes the least memory, or `one_group`, if layers may share one, where that takes no more."""
    num_layers = sum(map(len, kinds.values()))
    num_blocks = -(-max_model_len // next(iter(kinds)).block_size)
    best: tuple[int, int, int] | None = None  # memory in blocks of a layer, groups, layers per group
    num_whole = next((len(names) for spec, names in kinds.items() if spec.keeps_sequence), 1)
    for per_group in range(num_whole, max(map(len, kinds.values())) + 1):
        num_groups = memory = 0
        for spec, names in kinds.items():
            num = -(-len(names) // per_group)
            num_groups += num
            memory += num * per_group * min(num_blocks, spec.most_blocks(1) or num_blocks)
        is_allowed = num_groups <= MAX_GROUPS and _padding(num_layers, num_groups * per_group) <= MAX_PADDING
        if is_allowed and (best is None or (memory, num_groups) < best[:2]):
            best = (memory, num_groups, per_group)
    if one_group is not None and (best is None or best[0] >= num_layers * num_blocks):
        return one_group, "one group: layers with and without windows do not divide into groups that take less memory"
    counts = "; ".join(f"{len(names)} layers of {spec.describe()}" for spec, names in kinds.items())
    if best is None:
        raise UnsupportedError(
            f"{counts} do not divide into at most {MAX_GROUPS} groups of equally many layers with at most "
            f"{MAX_PADDING:.0%} of the memory unused",
            hint="models whose layer types have counts with a common divisor are supported",
            field="model",
        )
    memory, num_groups, per_group = best
    groups = []
    for spec, names in sorted(kinds.items(), key=lambda kind: not kind[0].keeps_sequence):
        num = -(-len(names) // per_group)
        for i in range(num):
            part = tuple(names[i * len(names) // num : (i + 1) * len(names) // num])
            groups.append(KVCacheGroupSpec(layer_names=part, spec=spec))
    padding = _padding(num_layers, num_groups * per_group)
    return tuple(groups), (
        f"{num_groups} groups of up to {per_group} layers ({counts}), {padding:.0%} of the blocks' memory is padding; "
        f"a request of {max_model_len} tokens takes {memory / (num_layers * num_blocks):.0%} of what one group would"
    )


def _padding(num_layers: int, num_slots: int) -> float:
    return 1 - num_layers / num_slots


def _by_kind(specs: Mapping[str, KVCacheSpec]) -> Kinds:
    kinds: Kinds = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    return kinds


def _one_group(kinds: Kinds) -> Groups:
    ((spec, names),) = kinds.items()
    return (KVCacheGroupSpec(layer_names=tuple(names), spec=spec),)


def _of_one_page_size(specs: Mapping[str, KVCacheSpec]) -> Mapping[str, KVCacheSpec]:
    """The specs, checked to agree on the shape of a block but for windows; states are padded to that size."""
    if not specs:
        raise UnsupportedError("the model does not have attention layers, so there is nothing to cache", field="model")
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    shapes = {name: spec.unwindowed() for name, spec in specs.items() if name not in states}
    for name, shape in shapes.items():
        first_name, first = next(iter(shapes.items()))
        if shape != first:
            raise UnsupportedError(
                f"layers {first_name!r} and {name!r} need KV-cache blocks of different shapes: {specs[first_name]} and "
                f"{specs[name]}",
                hint="only one shape for all layers is supported",
                field="model",
            )
    if not states:
        return specs
    largest = max(states, key=lambda name: states[name].state_bytes)
    size = states[largest].state_bytes
    if shapes:
        attention = next(iter(shapes.values()))
        if size > attention.page_size_bytes:
            block_size = -(-size * attention.block_size // attention.page_size_bytes)
            raise UnsupportedError(
                f"layer {largest!r} needs {states[largest].describe()}, and a block of "
                f"{attention.block_size} tokens of attention has {attention.page_size_bytes}",
                hint=f"use block_size >= {block_size}",
                field="block_size",
            )
        size = attention.page_size_bytes
    padded = {name: dataclasses.replace(state, page_size_padded=size) for name, state in states.items()}
    return {**specs, **padded}
