"""Nemotron-H: each layer is one thing alone: Mamba 2, attention, a dense network or a mixture."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.families.mamba import BACKBONE_NAMES
from quire.config.hf_config import (
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    make_arch,
    read_activation,
    read_heads,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_mamba import layer_kinds, make_mamba2
from quire.config.hf_moe import read_grouped_router, read_num_chosen, read_num_experts
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

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""


class NemotronH(ModelFamily):
    """Attention without positions; squared ReLUs without gates. Source: NVIDIA 2025 (Nemotron-H), section 2.1."""

    tensor_names = (
        (r"\.moe\.router\.correction$", ".moe.gate.e_score_correction_bias"),
        (r"\.moe\.router\.", ".moe.gate."),
        (r"\.moe\.shared_expert\.", ".moe.shared_experts."),
        (r"\.latent_in\.", ".fc1_latent_proj."),
        (r"\.latent_out\.", ".fc2_latent_proj."),
        *BACKBONE_NAMES,
    )
    ignored_tensors = (r"^mtp\.",)

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5))
        layers = [_layer(config, kind, norm) for kind in _kinds(config)]
        return make_arch(config, layers, read_max_positions(config), head=HeadArch(norm=norm))


def _kinds(config: FieldReader) -> list[str]:
    pattern = config.raw.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or config.has("layers_block_type") or config.has("layer_types"):
        kinds = layer_kinds(config, ("layers_block_type", "layer_types"), None, tuple(KINDS.values()))
    else:
        unknown = set(pattern) - set(KINDS)
        if unknown:
            raise config.error("hybrid_override_pattern", f"has {min(unknown)!r}", f"known: {', '.join(KINDS)}")
        kinds = [KINDS[letter] for letter in pattern]
    if not 1 <= len(kinds) <= MAX_LAYERS:
        raise config.error("layers_block_type", f"names {len(kinds)} layers", f"it must be 1 to {MAX_LAYERS}")
    return kinds


def _layer(config: FieldReader, kind: str, norm: NormArch) -> LayerArch:
    if kind == "mamba":
        return LayerArch(mamba=_mamba(config, norm), mixer_norm=norm)
    if kind == "attention":
        return LayerArch(attention=_attention(config), mixer_norm=norm)
    if kind == "mlp":
        return LayerArch(mlp=_mlp(config), ffn_norm=norm)
    return LayerArch(moe=_mixture(config), ffn_norm=norm)


def _mamba(config: FieldReader, norm: NormArch) -> MambaArch:
    head_size = config.integer("mamba_head_dim", 1, 1 << 16, 64)
    num_heads = config.integer("mamba_num_heads", 1, MAX_HEADS, 128)
    config.text("mamba_hidden_act", ("silu", "swish"), "silu")
    return make_mamba2(
        config,
        inner_size=num_heads * head_size,
        num_heads=("mamba_num_heads", 128),
        head_size="mamba_head_dim",
        groups=("mamba_n_groups", 8) if config.has("mamba_n_groups") else ("n_groups", 8),
        state=("ssm_state_size", 128),
        conv_size="mamba_d_conv" if config.has("mamba_d_conv") else "conv_kernel",
        norm=norm,
        has_bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        time_step_range=(config.number("time_step_min", 0.0, 1e6, 0.001), float("inf")),
    )


def _attention(config: FieldReader) -> AttentionArch:
    heads = read_heads(config, default_head_size=128)
    return AttentionArch(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        scale=heads.head_size**-0.5,
    )


def _mlp(config: FieldReader) -> MLPArch:
    return MLPArch(
        intermediate_size=read_intermediate_size(config),
        activation=_activation(config),
        is_gated=False,
        has_bias=config.flag("mlp_bias", False),
    )


def _mixture(config: FieldReader) -> MoEArch:
    num_experts = read_num_experts(config)
    num_chosen = read_num_chosen(config, num_experts)
    router = RouterArch(
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 0.0, 1e6, 1.0),
        group_score="top2",
        has_correction=True,
    )
    return MoEArch(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=read_intermediate_size(config, "moe_intermediate_size"),
        router=read_grouped_router(config, num_experts, num_chosen, router),
        activation=_activation(config),
        is_gated=False,
        shared_size=read_intermediate_size(config, "moe_shared_expert_intermediate_size"),
        latent_size=config.integer("moe_latent_size", 0, MAX_HIDDEN_SIZE, 0),
    )


def _activation(config: FieldReader) -> str:
    return read_activation(config, "mlp_hidden_act", "relu2", ("relu2", "silu", "swish", "relu"))
