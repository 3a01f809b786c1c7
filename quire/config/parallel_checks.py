"""What cannot be computed by several ranks (yet), each refused by its name. Called by `config.resolve`. Pure."""

from __future__ import annotations

import re

from quire.config.engine import QuireConfig
from quire.config.expert_placement import place_experts
from quire.config.model import OWN_QUANTIZATIONS
from quire.config.pipeline import divide_layers, parse_partition
from quire.errors import ConfigError, UnsupportedError
from quire.logger import get_logger

MAX_RANKS = 64  # of one communicator

logger = get_logger(__name__)


def size_settings(config: QuireConfig) -> str:
    """The settings that ask for several ranks, with their values."""
    sizes = {
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
        "data_parallel_size": config.parallel.data_parallel_size if config.parallel.replicas_share_experts else 1,
    }
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def check_parallel(config: QuireConfig) -> None:
    """Raise for settings of a resolved configuration that several ranks cannot honour."""
    sizes = size_settings(config)
    num_ranks = config.parallel.num_ranks
    if config.parallel.replicas_share_experts:
        num_ranks *= config.parallel.data_parallel_size
    if num_ranks > MAX_RANKS:
        raise ConfigError(
            f"{sizes} are {num_ranks} ranks, more than {MAX_RANKS}",
            hint=f"their product must be at most {MAX_RANKS}", field="pipeline_parallel_size",
        )  # fmt: skip
    _check_stages(config)
    if config.parallel.enable_expert_parallel:
        _check_experts(config)
    if num_ranks == 1:
        return
    model = config.model
    others = {
        "attention_backend": (config.device.attention_backend != "native_cpu", "it needs the native CPU kernels"),
        "model_impl": (model.model_impl == "transformers", "classes of transformers are not divided"),
        "quantization": (
            model.quantization is not None and model.quantization not in OWN_QUANTIZATIONS,
            "formats of plugins are not divided",
        ),
        "quantization_report": (model.quantization_report, "no rank has the whole of a matrix"),
    }  # fmt: skip
    for name, (is_set, why) in others.items():
        if is_set:
            raise UnsupportedError(
                f"{name} is not supported with {sizes}: {why}",
                hint=f"use {re.sub('=[0-9]+', '=1', sizes)}, or leave out {name}",
                field=name,
            )


def _check_stages(config: QuireConfig) -> None:
    """What stages cannot be made of."""
    parallel = config.parallel
    if parallel.pipeline_layer_partition is not None:
        parse_partition(parallel.pipeline_layer_partition)
    if parallel.pipeline_parallel_size == 1:
        if parallel.pipeline_layer_partition is not None:
            raise ConfigError(
                "pipeline_layer_partition divides the layers among stages, and pipeline_parallel_size is 1",
                hint="set pipeline_parallel_size, or leave it out", field="pipeline_layer_partition",
            )  # fmt: skip
        return
    assert config.arch is not None, "checked after the rules have run"
    divide_layers(config.arch, parallel.pipeline_parallel_size, parallel.pipeline_layer_partition)


def _check_experts(config: QuireConfig) -> None:
    parallel, arch = config.parallel, config.arch
    assert arch is not None, "the config is resolved"
    field = "enable_expert_parallel"
    counts = {layer.moe.num_experts for layer in arch.layers if layer.moe is not None}
    if not counts:
        raise ConfigError(f"{arch.architecture} has no experts", hint="leave out enable_expert_parallel", field=field)
    num_ranks = parallel.tensor_parallel_size
    if parallel.replicas_share_experts:
        _check_lock_step(config)
        num_ranks *= parallel.data_parallel_size
    if num_ranks == 1:
        logger.warning("enable_expert_parallel has no effect with one rank, which has all experts")
    for count in sorted(counts):
        place_experts(parallel.expert_placement_strategy, count, num_ranks)


def _check_lock_step(config: QuireConfig) -> None:
    """What replicas that share experts do not do (yet)."""
    parallel, speculative = config.parallel, config.speculative
    others = {
        "pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "stages compute several steps at once"),
        "distributed_executor_backend": (
            parallel.distributed_executor_backend not in ("uni", "mp"), "they share memory of one machine",
        ),
        "speculative_config": (
            speculative is not None and (speculative.model_method is not None or bool(speculative.tree)),
            "passes of a drafting model are not in lock-step; drafts from n-grams and suffixes work",
        ),
    }  # fmt: skip
    for name, (is_set, why) in others.items():
        if is_set:
            raise UnsupportedError(
                f"{name} is not supported where replicas share experts (data_parallel_size="
                f"{parallel.data_parallel_size} and enable_expert_parallel): {why}",
                hint=f"leave out {name}, or enable_expert_parallel", field=name,
            )  # fmt: skip
