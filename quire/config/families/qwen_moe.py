"""Qwen2-MoE and Qwen3-MoE: Qwens with mixtures in the place of MLPs, the first with a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from quire.config.families.qwen import Qwen2, Qwen3
from quire.config.hf_config import MAX_LAYERS, Heads, read_heads, read_intermediate_size
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import MLP_MIXTURE_NAMES, read_num_chosen, read_num_experts, with_experts
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, ModelArch, MoEArch, RouterArch


def read_qwen_moe(config: FieldReader) -> MoEArch:
    """The mixture of those layers that have one."""
    num_experts = read_num_experts(config)
    return MoEArch(
        num_experts=num_experts,
        num_chosen=read_num_chosen(config, num_experts),
        intermediate_size=read_intermediate_size(config, "moe_intermediate_size"),
        router=RouterArch(is_normalized=config.flag("norm_topk_prob", False)),
    )


def read_shared_expert(config: FieldReader, moe: MoEArch) -> MoEArch:
    """`moe` with a gated shared expert."""
    shared_size = read_intermediate_size(config, "shared_expert_intermediate_size")
    return dataclasses.replace(moe, shared_size=shared_size, has_shared_gate=True)


def read_sparse_layers(config: FieldReader) -> Callable[[int], bool]:
    """Whether a layer has a mixture: every `decoder_sparse_step`th, without those of `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = config.integers("mlp_only_layers", 0, MAX_LAYERS)
    return lambda layer: layer not in dense and (layer + 1) % step == 0


class Qwen2Moe(Qwen2):
    """Source: Qwen Team 2024 (Qwen2 Technical Report), section 2.2.2."""

    tensor_names = MLP_MIXTURE_NAMES

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        moe = read_shared_expert(config, read_qwen_moe(config))
        return with_experts(super().parse(raw), moe, read_sparse_layers(config))

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Biases on queries, keys and values unless config.json says otherwise."""
        return dataclasses.replace(attention, qkv_bias=config.flag("qkv_bias", True))

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Every other layer below `max_window_layers` unless `layer_types` says which."""
        if config.texts("layer_types") or not config.flag("use_sliding_window", False):
            return super().windows(config, num_layers)
        window = config.integer("sliding_window", 1, MAX_POSITIONS, 4096)
        last = config.integer("max_window_layers", 0, 1 << 16, 28)
        return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(num_layers))


class Qwen3Moe(Qwen3):
    """Source: Qwen Team 2025 (Qwen3 Technical Report), section 2."""

    tensor_names = MLP_MIXTURE_NAMES

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        return with_experts(super().parse(raw), read_qwen_moe(config), read_sparse_layers(config))

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Without `head_dim`, heads divide the hidden size."""
        return read_heads(config)

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """One for all layers, when switched on."""
        if not config.flag("use_sliding_window", False):
            return (None,) * num_layers
        return (config.integer("sliding_window", 1, MAX_POSITIONS, 4096),) * num_layers
