"""GLM-4-MoE (GLM-4.5 and 4.6): a Llama with half-rotated heads, and DeepSeek-V3's mixtures after the first layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.config.families.llama import Llama
from quire.config.hf_config import MAX_LAYERS, read_intermediate_size, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import (
    MLP_MIXTURE_NAMES,
    read_grouped_router,
    read_num_chosen,
    read_num_experts,
    with_experts,
)
from quire.config.model_arch import AttentionArch, ModelArch, MoEArch, NormArch, RouterArch


def read_corrected_moe(config: FieldReader) -> MoEArch:
    """DeepSeek-V3's mixture: sigmoid scores, corrected for the choice, groups by their two best, shared experts.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """
    num_experts = read_num_experts(config)
    num_chosen = read_num_chosen(config, num_experts)
    router = RouterArch(
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 0.0, 1e6, 1.0),
        group_score="top2",
        has_correction=True,
    )
    size = read_intermediate_size(config, "moe_intermediate_size")
    return MoEArch(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        router=read_grouped_router(config, num_experts, num_chosen, router),
        shared_size=size * config.integer("n_shared_experts", 0, 64, 1),
    )


class Glm4Moe(Llama):
    """Source: GLM-4.5 Team 2025 (GLM-4.5), section 2.1."""

    tensor_names = ((r"\.moe\.shared_expert\.", ".mlp.shared_experts."), *MLP_MIXTURE_NAMES)
    # The layer behind the last predicts several tokens: those of the two sizes that are published.
    ignored_tensors = (r"^model\.layers\.(46|92)\.",)

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        num_dense = config.integer("first_k_dense_replace", 0, MAX_LAYERS, 1)
        # transformers puts the share of rotated elements beside the other rotary fields, older files on top.
        arch = super().parse({"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **raw})
        return with_experts(arch, read_corrected_moe(config), lambda layer: layer >= num_dense)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Biases on queries, keys and values, and norms on heads, where config.json says so."""
        norm = NormArch(eps=read_norm_eps(config)) if config.flag("use_qk_norm", False) else None
        return dataclasses.replace(attention, qkv_bias=config.flag("attention_bias", False), head_norm=norm)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False
