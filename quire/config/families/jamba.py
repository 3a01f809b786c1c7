"""Jamba: layers of Mamba 1, and of attention at a distance, with dense networks and mixtures in turn."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.hf_config import (
    MAX_LAYERS,
    make_arch,
    read_activation,
    read_heads,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_mamba import read_conv_size, read_inner_size, read_state_size, read_time_step_rank
from quire.config.hf_moe import MAX_EXPERTS, read_num_chosen
from quire.config.model_arch import (
    AttentionArch,
    HeadArch,
    LayerArch,
    MambaArch,
    MLPArch,
    ModelArch,
    MoEArch,
    NormArch,
    RouterArch,
)
from quire.config.model_family import ModelFamily


class Jamba(ModelFamily):
    """Attention without positions; norms on time step, B and C. Source: Lieber et al. 2024 (Jamba), section 2."""

    tensor_names = (
        (r"\.mixer_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".pre_ff_layernorm."),
        (r"\.(mlp|moe)\.", ".feed_forward."),
        (r"^model\.norm\.", "model.final_layernorm."),
    )

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        norm = NormArch(eps=read_norm_eps(config))
        attention, mamba = _attention(config), _mamba(config, norm)
        size, activation = read_intermediate_size(config), read_activation(config)
        num_experts = config.integer("num_experts", 1, MAX_EXPERTS, 16)
        mlp = MLPArch(intermediate_size=size, activation=activation)
        moe = None if num_experts == 1 else _mixture(config, num_experts)
        has_attention, has_experts = _turns(config, "attn_layer", 8, 4), _turns(config, "expert_layer", 2, 1)
        layers = []
        for i in range(read_num_layers(config)):
            is_attention, is_mixture = i % has_attention[0] == has_attention[1], i % has_experts[0] == has_experts[1]
            is_mixture = is_mixture and moe is not None
            layers.append(
                LayerArch(
                    attention=attention if is_attention else None,
                    mamba=None if is_attention else mamba,
                    mlp=None if is_mixture else mlp,
                    moe=moe if is_mixture else None,
                    mixer_norm=norm,
                    ffn_norm=norm,
                )
            )
        return make_arch(config, layers, read_max_positions(config), head=HeadArch(norm=norm))


def _attention(config: FieldReader) -> AttentionArch:
    heads = read_heads(config)
    return AttentionArch(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.head_size**-0.5,
    )


def _mamba(config: FieldReader, norm: NormArch) -> MambaArch:
    return MambaArch(
        version=1,
        inner_size=read_inner_size(config, "mamba_expand"),
        state_size=read_state_size(config, "mamba_d_state", 16),
        conv_size=read_conv_size(config, "mamba_d_conv"),
        time_step_rank=read_time_step_rank(config, "mamba_dt_rank"),
        conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias", False),
        parameter_norm=norm,
    )


def _mixture(config: FieldReader, num_experts: int) -> MoEArch:
    return MoEArch(
        num_experts=num_experts,
        num_chosen=read_num_chosen(config, num_experts),
        intermediate_size=read_intermediate_size(config),
        router=RouterArch(is_normalized=False),
        activation=read_activation(config),
    )


def _turns(config: FieldReader, kind: str, period: int, offset: int) -> tuple[int, int]:
    """Every so many layers, and which of them: layer i where i % period == offset."""
    every = config.integer(f"{kind}_period", 1, MAX_LAYERS, period)
    return every, config.integer(f"{kind}_offset", 0, every - 1, offset)
