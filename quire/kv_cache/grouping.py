"""Which layers share a block table: layers that keep the same pages, in groups of equally many.

Called by planning. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.core.kv_spec import AttentionSpec, KVCacheGroupSpec
from quire.errors import UnsupportedError
from quire.kv_cache.page_counts import most_blocks

MAX_GROUPS = 8
"""Most groups of a model: each costs the scheduler and the worker some time in every step."""

MAX_PADDING = 0.25
"""Most of a page's memory that may be unused: short requests, whose windows free nothing, pay for it, too."""


def group_layers(
    specs: Mapping[str, AttentionSpec], max_model_len: int, *, frees_pages: bool
) -> tuple[tuple[KVCacheGroupSpec, ...], str]:
    """Divide a model's layers into KV cache groups.

    Layers whose windows differ are divided so that a long decoding request takes the least memory, padding included;
    where no division of little padding takes less than one group that keeps everything does, it is that one.

    Args:
        specs: layer name -> what it needs.
        max_model_len: longest request, in tokens; a window as long is none.
        frees_pages: False = every layer keeps all pages, and windows are only masked.

    Returns:
        The groups, and what was decided for which reason.

    Raises:
        UnsupportedError: layers differ in the shape of a page, or there are none.
    """
    whole = _common_shape(specs)
    one_group = (KVCacheGroupSpec(layer_names=tuple(specs), spec=whole),)
    kinds: dict[AttentionSpec, list[str]] = {}
    for name, spec in specs.items():
        is_local = spec.num_tokens_seen is not None and spec.num_tokens_seen < max_model_len
        kinds.setdefault(spec if is_local else whole, []).append(name)
    if set(kinds) == {whole}:
        return one_group, "one group: no layer has a window shorter than max_model_len"
    if not frees_pages:
        return one_group, "one group, as disable_hybrid_kv_cache_manager is set: windows are masked, no page is freed"
    if len(kinds) == 1:
        spec = next(iter(kinds))
        return (
            dataclasses.replace(one_group[0], spec=spec),
        ), f"one group: {_describe(spec)}, pages are freed behind it"
    return _divide(kinds, whole, max_model_len, one_group)


def _divide(
    kinds: dict[AttentionSpec, list[str]],
    whole: AttentionSpec,
    max_model_len: int,
    one_group: tuple[KVCacheGroupSpec, ...],
) -> tuple[tuple[KVCacheGroupSpec, ...], str]:
    num_layers, num_pages = len(one_group[0].layer_names), -(-max_model_len // whole.block_size)
    best: tuple[int, int, int] | None = None  # memory in pages of a layer, groups, layers per group
    for per_group in range(len(kinds.get(whole, " ")), max(map(len, kinds.values())) + 1):
        num_groups = memory = 0
        for spec, names in kinds.items():
            num = -(-len(names) // per_group)
            num_groups += num
            memory += num * per_group * min(num_pages, most_blocks(spec, 1) or num_pages)
        is_allowed = num_groups <= MAX_GROUPS and _padding(num_layers, num_groups * per_group) <= MAX_PADDING
        if is_allowed and (best is None or (memory, num_groups) < best[:2]):
            best = (memory, num_groups, per_group)
    if best is None or best[0] >= num_layers * num_pages:
        return one_group, "one group: layers with and without windows do not divide into groups that take less memory"
    memory, num_groups, per_group = best
    groups = []
    for spec, names in sorted(kinds.items(), key=lambda kind: kind[0] != whole):
        num = -(-len(names) // per_group)
        for i in range(num):
            part = tuple(names[i * len(names) // num : (i + 1) * len(names) // num])
            groups.append(KVCacheGroupSpec(layer_names=part, spec=spec))
    counts = "; ".join(f"{len(names)} layers of {_describe(spec)}" for spec, names in kinds.items())
    padding = _padding(num_layers, num_groups * per_group)
    return tuple(groups), (
        f"{num_groups} groups of up to {per_group} layers ({counts}), {padding:.0%} of the pages' memory is padding; "
        f"a request of {max_model_len} tokens takes {memory / (num_layers * num_pages):.0%} of what one group would"
    )


def _padding(num_layers: int, num_slots: int) -> float:
    return 1 - num_layers / num_slots


def _common_shape(specs: Mapping[str, AttentionSpec]) -> AttentionSpec:
    """What all layers need, windows aside."""
    if not specs:
        raise UnsupportedError("the model has no attention layer, so there is nothing to cache", field="model")
    first_name, first = next(iter(specs.items()))
    shape = _without_window(first)
    for name, spec in specs.items():
        if _without_window(spec) != shape:
            raise UnsupportedError(
                f"layers {first_name!r} and {name!r} need KV cache pages of different shape: {first} and {spec}",
                hint="one shape for all layers is supported",
                field="model",
            )
    return shape


def _without_window(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, sliding_window=None, attention_chunk_size=None)


def _describe(spec: AttentionSpec) -> str:
    if spec.attention_chunk_size is not None:
        return f"attention within chunks of {spec.attention_chunk_size} tokens"
    if spec.sliding_window is not None:
        return f"a sliding window of {spec.sliding_window} tokens"
    return "full attention"
