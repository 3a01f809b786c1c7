"""LFM2: short convolutions, and attention with norms on heads in some layers; dense or a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import (
    MAX_LAYERS,
    read_intermediate_size,
    read_layer_types,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import read_num_chosen, read_num_experts, with_experts
from quire.config.model_arch import AttentionArch, ModelArch, MoEArch, NormArch, RouterArch, ShortConvArch
from quire.config.model_family import TensorNames

CONV, FULL = "conv", "full_attention"
LFM2_NAMES: TensorNames = (
    (r"\.mixer_norm\.", ".operator_norm."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
    (r"\.moe\.router\.correction$", ".feed_forward.expert_bias"),
    (r"\.moe\.router\.", ".feed_forward.gate."),
    (r"\.(mlp|moe)\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
    (r"^model\.norm\.", "model.embedding_norm."),
)


class Lfm2(Llama):
    """Dense."""

    tensor_names: ClassVar[TensorNames] = LFM2_NAMES

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        given = FieldReader(raw)
        tied = given.flag("tie_embedding", given.flag("tie_word_embeddings", True))
        config = FieldReader(
            {
                **raw,
                "rope_theta": raw["rope_theta"] if given.has("rope_theta") else 1e6,
                "rms_norm_eps": given.number("norm_eps", 1e-12, 0.1, 1e-5),
                "intermediate_size": cls.intermediate_size(given),
                "tie_word_embeddings": tied,
                "layer_types": None,
            }
        )
        conv = ShortConvArch(
            conv_size=config.integer("conv_L_cache", 2, 8, 3), has_bias=config.flag("conv_bias", False)
        )
        arch = super().parse(config.raw)
        layers = [
            layer if kind == FULL else dataclasses.replace(layer, attention=None, short_conv=conv)
            for layer, kind in zip(arch.layers, read_lfm2_layers(given), strict=True)
        ]
        return dataclasses.replace(arch, layers=tuple(layers))

    @classmethod
    def intermediate_size(cls, config: FieldReader) -> int:
        """Two thirds of `block_ff_dim` or `intermediate_size`, multiplied and rounded up, unless switched off."""
        size = read_intermediate_size(config, "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
        if not config.flag("block_auto_adjust_ff_dim", True):
            return size
        multiple = config.integer("block_multiple_of", 1, 1 << 16, 256)
        size = int(config.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * size / 3))
        return -(-size // multiple) * multiple

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms on heads, without biases."""
        return dataclasses.replace(attention, head_norm=NormArch(eps=read_norm_eps(config)))

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False


class Lfm2Moe(Lfm2):
    """Mixtures whose experts are chosen by the sigmoids of their logits and a correction, after some dense layers."""

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        num_experts = read_num_experts(config)
        moe = MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=read_intermediate_size(config, "moe_intermediate_size"),
            router=RouterArch(
                scoring="sigmoid",
                is_normalized=config.flag("norm_topk_prob", True),
                scale=config.number("routed_scaling_factor", 0.0, 1e4, 1.0),
                has_correction=config.flag("use_expert_bias", True),
            ),
        )
        num_dense = config.integer("num_dense_layers", 0, MAX_LAYERS, 2)
        return with_experts(super().parse(raw), moe, lambda layer: layer >= num_dense)

    @classmethod
    def intermediate_size(cls, config: FieldReader) -> int:
        """As it is written."""
        return read_intermediate_size(config)


def read_lfm2_layers(config: FieldReader) -> tuple[str, ...]:
    """The kind of each layer: `layer_types`, or attention in those of `full_attn_idxs` (all when absent)."""
    num_layers = read_num_layers(config)
    layer_types = read_layer_types(config, num_layers, (CONV, FULL))
    if layer_types:
        return layer_types
    full = config.integers("full_attn_idxs", 0, num_layers - 1) if config.has("full_attn_idxs") else range(num_layers)
    return tuple(FULL if layer in full else CONV for layer in range(num_layers))
