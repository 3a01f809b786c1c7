"""Falcon-H1: attention and Mamba 2 side by side in every layer, with multipliers on nearly everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
from quire.config.hf_mamba import make_mamba2, read_factors, read_inner_size, read_time_step_range
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import (
    AttentionArch,
    EmbeddingArch,
    HeadArch,
    LayerArch,
    MambaArch,
    MLPArch,
    ModelArch,
    NormArch,
)
from quire.config.model_family import ModelFamily

MAX_FACTOR = 1e6


class FalconH1(ModelFamily):
    """Source: Zuo et al. 2025 (Falcon-H1), sections 2.1 and 2.3 (multipliers)."""

    tensor_names = (
        (r"\.mixer_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".pre_ff_layernorm."),
        (r"\.mlp\.", ".feed_forward."),
        (r"^model\.norm\.", "model.final_layernorm."),
    )

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        norm = NormArch(eps=read_norm_eps(config, default=1e-5))
        attention, longest = _attention(config)
        gate_scale, down_scale = read_factors(config, "mlp_multipliers", 2)
        mlp = MLPArch(
            intermediate_size=read_intermediate_size(config),
            activation=read_activation(config),
            has_bias=config.flag("mlp_bias", False),
            gate_scale=gate_scale,
            output_scale=down_scale,
        )
        layer = LayerArch(attention=attention, mamba=_mamba(config, norm), mlp=mlp, mixer_norm=norm, ffn_norm=norm)
        return make_arch(
            config,
            [layer] * read_num_layers(config),
            longest,
            embedding=EmbeddingArch(scale=_factor(config, "embedding_multiplier")),
            head=HeadArch(norm=norm, scale=_factor(config, "lm_head_multiplier")),
        )


def _attention(config: FieldReader) -> tuple[AttentionArch, int]:
    """Without biases a factor on the input is one on keys and queries, so on scores twice, and one on the output."""
    heads = read_heads(config)
    rope, longest = parse_rope(config, heads.head_size, read_max_positions(config))
    input_scale = _factor(config, "attention_in_multiplier")
    has_bias = config.flag("attention_bias", False)
    if has_bias and input_scale != 1.0:
        raise config.error("attention_bias", "is set, with an attention_in_multiplier", "one of the two is supported")
    key_scale = _factor(config, "key_multiplier")
    if has_bias and key_scale != 1.0:
        raise config.error("attention_bias", "is set, with a key_multiplier", "one of the two is supported")
    attention = AttentionArch(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.head_size**-0.5 * key_scale * input_scale**2,
        rope=rope,
        qkv_bias=has_bias,
        output_bias=has_bias,
        output_scale=input_scale * _factor(config, "attention_out_multiplier"),
    )
    return attention, longest


def _mamba(config: FieldReader, norm: NormArch) -> MambaArch:
    if config.has("mamba_d_ssm"):
        inner_size = read_intermediate_size(config, "mamba_d_ssm")
    else:
        inner_size = read_inner_size(config, "mamba_expand")
    has_bias, input_scale = config.flag("mamba_proj_bias", False), _factor(config, "ssm_in_multiplier")
    if has_bias != config.flag("projectors_bias", False):
        raise config.error("projectors_bias", f"is {not has_bias}", f"mamba_proj_bias is {has_bias}; both or neither")
    if has_bias and input_scale != 1.0:
        raise config.error("mamba_proj_bias", "is set, with an ssm_in_multiplier", "one of the two is supported")
    multipliers = read_factors(config, "ssm_multipliers", 5)
    mamba = make_mamba2(
        config,
        inner_size=inner_size,
        num_heads=("mamba_n_heads", 128),
        head_size="mamba_d_head",
        groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256),
        conv_size="mamba_d_conv",
        norm=norm if config.flag("mamba_rms_norm", False) else None,
        has_bias=has_bias,
        conv_bias=config.flag("mamba_conv_bias", True),
        time_step_range=read_time_step_range(config),
    )
    return dataclasses.replace(
        mamba,
        norm_before_gate=config.flag("mamba_norm_before_gate", True),
        multipliers=() if multipliers == (1.0,) * 5 else multipliers,
        input_scale=input_scale,
        output_scale=_factor(config, "ssm_out_multiplier"),
    )


def _factor(config: FieldReader, name: str) -> float:
    return config.number(name, -MAX_FACTOR, MAX_FACTOR, 1.0)
