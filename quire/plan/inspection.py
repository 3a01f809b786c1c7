"""What a model is, what it would take here, and whether it would start: what a start checks before it reads weights.

Called by `quire inspect`. Goes through what a start goes through, by the same code: the machine and the settings
(`engine.config_lookup`), tokenizer and chat template (`engine.front_factory`), the headers of the weights, and the
division of the memory. Loads no torch. No state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire.config.model_arch import ModelArch
from quire.config.resolve import UsageContext
from quire.core.kv_spec import KVCacheSpec
from quire.engine.config_lookup import look_up
from quire.engine.front_factory import build_front_end
from quire.engine.memory_estimate import estimate_memory
from quire.errors import QuireError
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.planning import concurrency, plan_kv_cache
from quire.kv_cache.pool_sizes import PlannedRequests, needed_bytes
from quire.models.model_dir import read_model_dir
from quire.models.stored_weights import StoredWeights, check_weights, read_weights
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why the model does not start here, as the start would give it."""

    message: str
    hint: str
    field: str

    @classmethod
    def of(cls, error: QuireError) -> Problem:
        """Of an error."""
        return cls(error.message, error.hint or "", error.field or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes, as a start with these settings divides them.

    Attributes:
        weights, workspace: of the model and of its largest step.
        drafting_weights: of a model or heads that draft.
        kv_cache: of `num_requests` requests of `num_tokens` tokens.
        kv_cache_token: of one more token of a long request; windows and states make it less than the mean.
        available, usable: what is free, and the share of it that the engine may take.
        fitting_requests: how many requests of `num_tokens` tokens run at once; no more than `max_num_seqs`.
    """

    num_requests: int
    num_tokens: int
    weights: int
    drafting_weights: int
    workspace: int
    kv_cache: int
    kv_cache_token: int
    available: int
    usable: int
    fitting_requests: int

    @property
    def total(self) -> int:
        """Of weights, workspace and KV cache."""
        return self.weights + self.drafting_weights + self.workspace + self.kv_cache


@dataclass(slots=True, kw_only=True)
class Inspection:
    """What was found, as far as it could be.

    Attributes:
        model: as it was named.
        architecture: "" where config.json does not say.
        num_parameters, num_active_parameters: of all weights, and of those that one token passes through; 0 = unknown.
        weights: what is stored; None where it cannot be read.
        settings: those that a start resolves, by name.
        memory: None where it cannot be said.
        problems: empty = it starts here.
    """

    model: str
    path: str = ""
    architecture: str = ""
    num_layers: int = 0
    num_parameters: int = 0
    num_active_parameters: int = 0
    context_length: int = 0
    weights: StoredWeights | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    memory: MemoryNeed | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def runs_here(self) -> bool:
        """Whether a start would succeed."""
        return not self.problems


def inspect_model(
    config: QuireConfig, path: Path, num_requests: int, num_tokens: int | None, drafter: Path | None = None
) -> Inspection:
    """Look at a model.

    Args:
        config: the settings of a start.
        path: the model's directory or file.
        num_requests, num_tokens: load whose memory is asked for; None = `max_model_len` tokens.
        drafter: directory or file of the configured model that drafts; None = it is the model's own, or there is none.
    """
    found = Inspection(model=config.model.model, path=str(path))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(path)))
    platform = detect_platform(config.device.device)
    try:
        found.weights = read_weights(path)
    except QuireError as error:
        found.problems.append(Problem.of(error))
    try:
        config, model_dir, _ = look_up(config, platform, UsageContext.API_SERVER)
    except QuireError as error:
        found.problems.insert(0, Problem.of(error))
        found.architecture = _named_architecture(path)
        return found
    assert config.arch is not None, "look_up sets it"
    arch, unreadable = config.arch, found.problems
    _describe(found, config, arch)
    found.problems = []

    def set_memory() -> None:
        found.memory = memory_need(config, platform, num_requests, num_tokens, drafter)

    def check_stored() -> None:
        if found.weights is not None:
            check_weights(found.weights, arch)

    for step in (lambda: build_front_end(config, model_dir), set_memory, check_stored):  # in the order of a start
        try:
            step()
        except QuireError as error:
            found.problems.append(Problem.of(error))
    found.problems += unreadable
    return found


def memory_need(
    config: QuireConfig, platform: Platform, num_requests: int, num_tokens: int | None, drafter: Path | None
) -> MemoryNeed:
    """What a start takes, and a load.

    Args:
        config: resolved.
        drafter: as in `inspect_model`.

    Raises:
        ConfigError: requests of so many tokens are longer than `max_model_len`.
        NotEnoughMemoryError: a start would not find enough.
    """
    cache, max_len = config.cache, config.max_model_len
    assert cache.block_size is not None, "the configuration is resolved"
    found = estimate_memory(config, platform.memory_bytes, drafter, is_host=platform.is_cpu)
    limits, specs, budget = found.limits, found.specs, found.budget
    chunk = min(limits.max_num_batched_tokens, max_len)
    plan = plan_kv_cache(specs, budget.kv_cache_bytes, cache, max_len, chunk, limits.max_num_seqs, limits.num_drafts)
    length = max_len if num_tokens is None else num_tokens
    load = PlannedRequests(length, min(chunk, length))
    return MemoryNeed(
        num_requests=num_requests, num_tokens=length, weights=found.weights,
        drafting_weights=found.drafting_weights, workspace=found.workspace,
        kv_cache=_load_bytes(specs, cache.disable_hybrid_kv_cache_manager, load, num_requests),
        kv_cache_token=sum(spec.page_size_bytes for spec in specs.values() if spec.keeps_sequence) // cache.block_size,
        available=platform.memory_bytes, usable=int(platform.memory_bytes * cache.memory_utilization),
        fitting_requests=min(limits.max_num_seqs, int(concurrency(plan, length, min(chunk, length)))),
    )  # fmt: skip


def _load_bytes(specs: dict[str, KVCacheSpec], keeps_windows: bool, load: PlannedRequests, num_requests: int) -> int:
    """Bytes of the KV cache that so many requests fill, null blocks included."""
    groups, _ = group_layers(specs, load.max_model_len, frees_blocks=not keeps_windows)
    null_bytes = sum({group.pool: group.page_size_bytes for group in groups}.values())
    return num_requests * (needed_bytes(groups, load) - null_bytes) + null_bytes


def _describe(found: Inspection, config: QuireConfig, arch: ModelArch) -> None:
    """Shape and settings."""
    stored = 0 if found.weights is None else found.weights.num_parameters
    num_all = arch.num_layer_weights + arch.num_table_weights
    found.architecture, found.num_layers = arch.architecture, arch.num_layers
    found.num_parameters = stored or num_all
    found.num_active_parameters = found.num_parameters - arch.num_layer_weights + arch.num_active_layer_weights
    found.context_length = arch.max_position_embeddings
    stored_as = "gguf" if arch.gguf_architecture else arch.quantization.method if arch.quantization else None
    found.settings = {
        "device": config.device.device, "dtype": config.model.dtype,
        "quantization": config.model.quantization or stored_as,
        "attention_backend": config.device.attention_backend, "kernel_tier": config.device.kernel_tier,
        "model_impl": config.model.model_impl, "max_model_len": config.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs, "kv_cache_dtype": config.cache.kv_cache_dtype,
    }  # fmt: skip


def _named_architecture(path: Path) -> str:
    """What config.json calls the model, whatever else is wrong with it."""
    try:
        named = read_model_dir(path).config.get("architectures")
    except QuireError:
        return ""
    return str(named[0])[:100] if isinstance(named, list) and named else ""
