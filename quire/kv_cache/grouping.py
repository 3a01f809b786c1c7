"""Which layers share a block table, as they keep the same blocks, in groups of equally many; and which share a pool.

Called by planning. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.core.kv_spec import KVCacheGroupSpec, KVCacheSpec
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

    Layers whose blocks differ in shape are in different pools; in each pool layers whose windows differ are divided so
    that a long decoding request takes the least memory, padding included; where no division of little padding takes
    less than one group that keeps everything does, it is that one.

    Args:
        specs: layer name -> what it needs.
        max_model_len: longest request, in tokens; a window as long is none.
        frees_blocks: False = every layer keeps all blocks, and windows are only masked.

    Returns:
        The groups, those that keep whole sequences first, and what was decided for which reason. Pools are numbered in
        the order of their first layers, those of recurrent states last.

    Raises:
        UnsupportedError: kinds do not divide into groups, or there are no layers.
    """
    if not specs:
        raise UnsupportedError(
            "the model does not have layers with a cache, so there is nothing to plan", field="model"
        )
    by_shape: dict[KVCacheSpec, dict[str, KVCacheSpec]] = {}
    for name, spec in specs.items():
        by_shape.setdefault(spec.unwindowed(), {})[name] = spec
    pools = sorted(by_shape.values(), key=lambda of_pool: not next(iter(of_pool.values())).can_take_back)
    divided = [_group_pool(of_pool, max_model_len, frees_blocks=frees_blocks) for of_pool in pools]
    groups = [dataclasses.replace(group, pool=i) for i, (of_pool, _) in enumerate(divided) for group in of_pool]
    reasons = "; ".join(reason for _, reason in divided)
    if len(pools) > 1:
        reasons = f"{len(pools)} pools of blocks of different bytes: {reasons}"
    return tuple(sorted(groups, key=lambda group: not group.spec.keeps_sequence)), reasons


def _group_pool(specs: Mapping[str, KVCacheSpec], max_model_len: int, *, frees_blocks: bool) -> tuple[Groups, str]:
    """The groups of layers whose blocks have one shape."""
    masked = _by_kind({name: spec.unwindowed() for name, spec in specs.items()})
    kinds = _by_kind({name: spec.within(max_model_len) for name, spec in specs.items()})
    one_group = _one_group(masked)
    if kinds.keys() == masked.keys():
        spec = one_group[0].spec
        if not spec.can_take_back:
            return one_group, f"one group: {spec.describe()} in each layer for each request"
        return one_group, "one group: no layer has a window shorter than max_model_len"
    if not frees_blocks:
        return (
            one_group,
            "one group, disable_hybrid_kv_cache_manager is set: windows are masked, no block is freed early",
        )
    if len(kinds) == 1:
        return _one_group(kinds), f"one group: {next(iter(kinds)).describe()}, blocks are freed behind it"
    return _divide(kinds, max_model_len, one_group)


def _divide(kinds: Kinds, max_model_len: int, one_group: Groups) -> tuple[Groups, str]:
    """The division that takes the least memory, or `one_group` where that takes no more."""
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
    if best is None or best[0] >= num_layers * num_blocks:
        return one_group, "one group: layers with and without windows do not divide into groups that take less memory"
    memory, num_groups, per_group = best
    groups = []
    for spec, names in sorted(kinds.items(), key=lambda kind: not kind[0].keeps_sequence):
        num = -(-len(names) // per_group)
        for i in range(num):
            part = tuple(names[i * len(names) // num : (i + 1) * len(names) // num])
            groups.append(KVCacheGroupSpec(layer_names=part, spec=spec))
    padding = _padding(num_layers, num_groups * per_group)
    counts = "; ".join(f"{len(names)} layers of {spec.describe()}" for spec, names in kinds.items())
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
