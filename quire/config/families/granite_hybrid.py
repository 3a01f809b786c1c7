"""Granite 4: layers of Mamba 2 and some of attention, each with a dense network, and a mixture beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.hf_config import (
    make_arch,
    read_activation,
    read_heads,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_mamba import layer_kinds, make_mamba2, read_inner_size, read_time_step_range
from quire.config.hf_moe import MAX_EXPERTS, read_num_chosen
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import (
    AttentionArch,
    EmbeddingArch,
    HeadArch,
    LayerArch,
    MambaArch,
    MLPArch,
    ModelArch,
    MoEArch,
    NormArch,
    RouterArch,
)
from quire.config.model_family import LLAMA_NAMES, ModelFamily

MAX_FACTOR = 1e6


class GraniteHybrid(ModelFamily):
    """Factors on embedding, scores, outputs of parts and logits. Source: IBM 2025 (Granite 4.0), model card."""

    tensor_names = (
        *LLAMA_NAMES,
        (r"\.mlp\.gate_up_proj\.", ".shared_mlp.input_linear."),
        (r"\.mlp\.down_proj\.", ".shared_mlp.output_linear."),
        (r"\.moe\.router\.", ".block_sparse_moe.router.layer."),
        (r"\.moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
        (r"\.moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
    )
    layouts: ClassVar[Mapping[str, str]] = {"mlp.gate_up_proj": "concatenated", "moe.experts": "stacked"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        norm = NormArch(eps=read_norm_eps(config))
        kinds = layer_kinds(
            config, ("layer_types", "layers_block_type"), read_num_layers(config), ("mamba", "attention")
        )
        attention, longest = _attention(config)
        mamba = _mamba(config, norm) if "mamba" in kinds else None
        mlp = MLPArch(
            intermediate_size=read_intermediate_size(config, "shared_intermediate_size"),
            activation=read_activation(config),
        )
        moe = _mixture(config)
        layers = [
            LayerArch(
                attention=attention if kind == "attention" else None,
                mamba=mamba if kind == "mamba" else None,
                mlp=mlp,
                moe=moe,
                mixer_norm=norm,
                ffn_norm=norm,
                residual_scale=_factor(config, "residual_multiplier"),
            )
            for kind in kinds
        ]
        return make_arch(
            config,
            layers,
            longest,
            embedding=EmbeddingArch(scale=_factor(config, "embedding_multiplier")),
            head=HeadArch(norm=norm, scale=1.0 / _factor(config, "logits_scaling")),
        )


def _attention(config: FieldReader) -> tuple[AttentionArch, int]:
    heads = read_heads(config)
    rope, longest = parse_rope(config, heads.head_size, read_max_positions(config))
    has_positions = config.text("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    has_bias = config.flag("attention_bias", False)
    attention = AttentionArch(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=_factor(config, "attention_multiplier"),
        rope=rope if has_positions else None,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    return attention, longest


def _mamba(config: FieldReader, norm: NormArch) -> MambaArch:
    return make_mamba2(
        config,
        inner_size=read_inner_size(config, "mamba_expand"),
        num_heads=("mamba_n_heads", 128),
        head_size="mamba_d_head",
        groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256),
        conv_size="mamba_d_conv",
        norm=norm,
        has_bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        time_step_range=read_time_step_range(config),
    )


def _mixture(config: FieldReader) -> MoEArch | None:
    num_experts = config.integer("num_local_experts", 0, MAX_EXPERTS, 8)
    if num_experts == 0:
        return None
    return MoEArch(
        num_experts=num_experts,
        num_chosen=read_num_chosen(config, num_experts),
        intermediate_size=read_intermediate_size(config),
        router=RouterArch(scoring="softmax_of_chosen", is_normalized=False),
        activation=read_activation(config),
    )


def _factor(config: FieldReader, name: str) -> float:
    return config.number(name, 1e-6, MAX_FACTOR, 1.0)
