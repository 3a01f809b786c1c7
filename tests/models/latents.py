"""Tiny configs of families with latent attention: fields beside those that all tiny models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS: Mapping[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
}  # fmt: skip
MIXTURE: Mapping[str, Any] = {
    **HEADS, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.707,
    "mscale_all_dim": 1.0,
}  # fmt: skip
# Prefix of the classes in transformers -> fields.
LATENTS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2": {**MIXTURE, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    "DeepseekV3": {**MIXTURE, "rope_parameters": YARN},
    "Glm4MoeLite": {
        **{name: value for name, value in MIXTURE.items() if name != "first_k_dense_replace"},
        "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "MiniCPM3": {**HEADS, "dim_model_base": 32, "tie_word_embeddings": True},
}  # fmt: skip
