"""Latent attention in GGUF files: DeepSeek V2 and V3, GLM-4.7-Flash.

Source: llama.cpp, conversion/deepseek.py (DeepseekV2Model) and src/models/deepseek2.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.models.gguf.family import GGUF_NAMES, GGUFFamily
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.mixtures import num_dense_layers

# Numbers of `expert_gating_func`.
SCORES: Mapping[int | None, str] = {1: "softmax", 2: "sigmoid"}


class Deepseek2(GGUFFamily):
    """All heads share a latent: what it is projected to for keys and for values are two tensors, of keys transposed."""

    architecture = "DeepseekV2ForCausalLM"
    tensor_names = (
        (r"\.self_attn\.(q_a|q_b)_proj\.", r".attn_\1."),
        (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attn_kv_a_mqa."),
        (r"\.self_attn\.(q_a|kv_a)_layernorm\.", r".attn_\1_norm."),
        (r"\.self_attn\.kv_b_proj\.", ".attn_kv_b."),
        *GGUF_NAMES,
    )

    @classmethod
    def head_size(cls, metadata: Metadata) -> int | None:
        """Of the rotated part."""
        return metadata.needed_integer("rope.dimension_count")

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of the parts of heads; with a correction of the scores, of DeepSeek V3."""
        rope_size = metadata.needed_integer("rope.dimension_count")
        key_size = metadata.integer("attention.key_length_mla") or metadata.needed_integer("attention.key_length")
        fields: dict[str, object] = {
            "num_key_value_heads": metadata.integer("attention.head_count"),
            "head_dim": None,
            "qk_rope_head_dim": rope_size,
            "qk_nope_head_dim": key_size - rope_size,
            "v_head_dim": metadata.integer("attention.value_length_mla") or metadata.integer("attention.value_length"),
            "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
            "q_lora_rank": metadata.integer("attention.q_lora_rank"),
            "n_routed_experts": metadata.integer("expert_count"),
            "n_shared_experts": metadata.integer("expert_shared_count"),
            "first_k_dense_replace": num_dense_layers(metadata),
            "routed_scaling_factor": metadata.number("expert_weights_scale") or 1.0,
        }
        if cls.scores(metadata) == "sigmoid":
            fields.update(cls.corrected(metadata))
        elif metadata.integer("expert_group_count"):
            fields.update({
                "topk_method": "group_limited_greedy", "n_group": metadata.integer("expert_group_count"),
                "topk_group": metadata.integer("expert_group_used_count"),
            })  # fmt: skip
        return fields

    @classmethod
    def scores(cls, metadata: Metadata) -> str:
        """How experts are scored; where no key says it, those with a correction are scored by sigmoids."""
        number = metadata.integer("expert_gating_func")
        if number is not None and number not in SCORES:
            key = metadata.key("expert_gating_func")
            raise metadata.error(key, f"is {number}", "experts are scored by softmax (1) or sigmoid (2)")
        if number in SCORES:
            return SCORES[number]
        return "sigmoid" if any("exp_probs_b" in name for name in metadata.file.tensors) else "softmax"

    @classmethod
    def corrected(cls, metadata: Metadata) -> dict[str, object]:
        """DeepSeek V3's router."""
        is_normalized = metadata.flag("expert_weights_norm")
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": metadata.integer("expert_group_count") or 1,
            "topk_group": metadata.integer("expert_group_used_count") or 1,
            "norm_topk_prob": bool(is_normalized),
        }

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """The weight of YaRN's scale is stored as a tenth of it."""
        fields = super().rope(metadata)
        scaling, weight = fields.get("rope_scaling"), metadata.number("rope.scaling.yarn_log_multiplier")
        if isinstance(scaling, dict) and weight:
            fields["rope_scaling"] = {**scaling, "mscale": 10.0 * weight, "mscale_all_dim": 10.0 * weight}
        return fields
