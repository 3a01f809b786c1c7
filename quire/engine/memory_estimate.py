"""What a start takes of the memory, before there is a model, and the longest `max_model_len` for which that is enough.

Called by `quire inspect`, and by `engine.config_lookup` for `max_model_len=-1`. Loads no torch. No state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire.config.resolve import Decision
from quire.core.kv_spec import KVCacheSpec, MambaSpec
from quire.core.memory_budget import (
    RECORDED_STEPS_BYTES,
    MemoryBudget,
    StepLimits,
    drawn_drafts_bytes,
    estimate_weights_bytes,
    estimate_workspace_bytes,
    plan_memory,
)
from quire.engine.drafting_need import drafting_need
from quire.errors import NotEnoughMemoryError
from quire.kv_cache.planning import one_request_fits
from quire.kv_cache.pool_sizes import PlannedRequests, useful_bytes
from quire.models.hub import resolve_model_path
from quire.models.weight_files import kept_bytes
from quire.platforms.interface import Platform
from quire.simulator.mixers import cache_specs
from quire.utils.memory import GIB, MIB, format_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
LIBRARIES_BYTES = 512 * MIB
"""Host memory that the processes of an engine take after the estimate, before they look at what is free."""

Resolve = Callable[[QuireConfig], tuple[QuireConfig, list[Decision]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a start takes.

    Attributes:
        limits: the largest step.
        specs: layer -> what it keeps in the KV cache.
        weights, drafting_weights, workspace: bytes.
        budget: how the memory is divided.
    """

    limits: StepLimits
    specs: dict[str, KVCacheSpec]
    weights: int
    drafting_weights: int
    workspace: int
    budget: MemoryBudget


def estimate_memory(config: QuireConfig, free_bytes: int, drafter: Path | None, *, is_host: bool) -> MemoryEstimate:
    """What a start takes of the memory.

    Args:
        config: resolved.
        free_bytes: of the device.
        drafter: directory or file of the configured model that drafts; None = it is the model's own, or there is none.
        is_host: the device's memory is the host's.

    Raises:
        NotEnoughMemoryError: nothing is left for the KV cache.
    """
    arch, cache, scheduler = config.arch, config.cache, config.scheduler
    assert arch is not None and cache.block_size is not None, "the configuration is resolved"
    limits = StepLimits(
        max_num_seqs=scheduler.max_num_seqs or 1, max_num_batched_tokens=scheduler.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len, num_drafts=config.num_draft_tokens,
        max_step_drafts=config.max_step_drafts,
    )  # fmt: skip
    item, kv_item = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[cache.kv_cache_dtype]
    quantization = config.model.quantization
    drafting = drafting_need(config.speculative, drafter, arch, limits, cache.block_size, item, quantization)
    specs = _stored({**cache_specs(arch, cache.block_size, item), **drafting.specs}, kv_item)
    weights = estimate_weights_bytes(arch, limits.max_model_len, item, quantization, kept_bytes(config))
    workspace = max(estimate_workspace_bytes(arch, limits, item), drafting.workspace)
    workspace += _graph_bytes(config) * (2 if drafting.workspace else 1)
    if config.speculative is not None and config.speculative.draws_drafts:
        workspace += drawn_drafts_bytes(limits.max_num_seqs, limits.num_drafts, arch.vocab_size)
    useful = useful_bytes(specs, cache, limits.max_model_len, limits.max_num_seqs, limits.num_drafts)
    offload_bytes = int(cache.kv_offloading_size * GIB) if is_host else 0
    budget = plan_memory(
        free_bytes=free_bytes, utilization=cache.memory_utilization, weights_bytes=weights + drafting.weights,
        workspace_bytes=config.parallel.num_ranks * workspace + offload_bytes,
        swap_bytes=int(cache.swap_space * GIB) if is_host else 0, useful_bytes=useful if is_host else None,
    )  # fmt: skip
    return MemoryEstimate(
        limits=limits, specs=specs, weights=weights, drafting_weights=drafting.weights, workspace=workspace,
        budget=budget,
    )  # fmt: skip


def resolve_longest(
    config: QuireConfig, model_path: Path, platform: Platform, resolve: Resolve
) -> tuple[QuireConfig, list[Decision]]:
    """`config` resolved with the longest `max_model_len` of which one request fits, and what was chosen.

    Args:
        config: with `max_model_len=-1`, which `resolve` replaces by the largest that is allowed.
        model_path: where the model is.

    Raises:
        NotEnoughMemoryError: there is no such length.
        QuireError: as `resolve`.
    """
    speculative, drafter = config.speculative, None
    if speculative is not None and speculative.model is not None:
        drafter = resolve_model_path(speculative.model, speculative.revision, config.load.download_dir)
    largest, decisions = resolve(config)
    num_devices = 1 if platform.is_cpu else config.parallel.num_ranks
    free_bytes = platform.memory_bytes * num_devices - (LIBRARIES_BYTES if platform.is_cpu else 0)

    def budget_that_fits(length: int) -> int:
        """Bytes for the KV cache with that `max_model_len`; 0 = one request needs more."""
        found = resolve(_with_length(config, length))[0]
        found = dataclasses.replace(found, model_path=str(model_path))
        return _budget_that_fits(found, free_bytes, drafter, is_host=platform.is_cpu)

    if budget_that_fits(largest.max_model_len):
        reasons = [
            dataclasses.replace(one, reason=f"{one.reason}, which fits the KV cache")
            if one.name == "max_model_len" else one
            for one in decisions
        ]  # fmt: skip
        return dataclasses.replace(largest, has_longest_length=True), reasons
    longest, too_long, budget = 0, largest.max_model_len, 0
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if num_bytes := budget_that_fits(middle):
            longest, budget = middle, num_bytes
        else:
            too_long = middle
    if not longest:
        shortest = dataclasses.replace(resolve(_with_length(config, 1))[0], model_path=str(model_path))
        estimate_memory(shortest, free_bytes, drafter, is_host=platform.is_cpu)
        raise NotEnoughMemoryError(
            "max_model_len=-1: the memory for the KV cache is not enough for a request of any length",
            hint="free memory, raise kv_cache_memory_bytes or num_gpu_blocks_override if they are set, or use a "
            "smaller model", field="max_model_len",
        )  # fmt: skip
    found, decisions = resolve(_with_length(config, longest))
    reason = f"the longest that fits a KV cache of {format_bytes(budget)}; at most {largest.max_model_len}"
    chosen = Decision("max_model_len", longest, reason)
    return dataclasses.replace(found, has_longest_length=True), [*decisions, chosen]


def _budget_that_fits(config: QuireConfig, free_bytes: int, drafter: Path | None, *, is_host: bool) -> int:
    cache, max_len = config.cache, config.max_model_len
    try:
        found = estimate_memory(config, free_bytes, drafter, is_host=is_host)
    except NotEnoughMemoryError:
        return 0
    limits, num_bytes = found.limits, found.budget.kv_cache_bytes
    requests = PlannedRequests(
        max_len, min(limits.max_num_batched_tokens, max_len), limits.max_num_seqs, limits.num_drafts
    )
    if not one_request_fits(found.specs, num_bytes, cache, requests):
        return 0
    if cache.num_blocks is not None:
        return cache.num_blocks * sum(spec.page_size_bytes for spec in found.specs.values())
    return num_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes


def _with_length(config: QuireConfig, length: int) -> QuireConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=length))


def _stored(specs: Mapping[str, Any], kv_item_bytes: int) -> dict[str, KVCacheSpec]:
    """What layers keep: states with numbers of their own types, all else in that of the cache."""
    return {
        name: spec if isinstance(spec, MambaSpec) else dataclasses.replace(spec, dtype_bytes=kv_item_bytes)
        for name, spec in specs.items()
    }


def _graph_bytes(config: QuireConfig) -> int:
    """Of recorded steps, where the native kernels record them."""
    is_native = config.device.attention_backend == "native_cpu"
    is_recording = is_native and not config.model.enforce_eager and config.model.model_impl != "transformers"
    return RECORDED_STEPS_BYTES if is_recording else 0
