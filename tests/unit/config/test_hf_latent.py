"""Families with latent attention: what config.json says, and what is refused with the name of the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.config.families.registry import parse_config
from quire.config.model_arch import LatentAttentionArch, MoEArch
from quire.errors import ModelError

YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
MINICPM3 = {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "vocab_size": 73448, "hidden_size": 2560,
    "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40, "num_key_value_heads": 40,
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256, "max_position_embeddings": 32768,
}  # fmt: skip


V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "max_position_embeddings": 163840,
    "rope_theta": 10000, "rope_scaling": YARN, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
V3 = {
    **V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "topk_method": "noaux_tc", "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "moe_intermediate_size": 2048,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def attention_of(config: dict[str, Any]) -> LatentAttentionArch:
    attention = parse_config(config).layers[0].latent_attention
    assert attention is not None
    return attention


def test_the_scale_of_scores_has_the_square_of_yarns_factor():
    assert attention_of(MINICPM3).scale == pytest.approx(96**-0.5)
    scaled = attention_of({**MINICPM3, "rope_scaling": YARN}).scale
    assert scaled == pytest.approx(96**-0.5 * (0.0707 * math.log(40) + 1) ** 2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fewer key/value heads": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "an odd latent": ({"kv_lora_rank": 511}, "kv_lora_rank"),
    "no latent": ({"kv_lora_rank": None}, "kv_lora_rank"),
    "an odd rotated part": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    "weights of six bits": ({"quantization_config": {"quant_method": "fp6"}}, "quant_method"),
}


@pytest.mark.parametrize("changes, field", WRONG.values(), ids=list(WRONG))
def test_a_config_that_does_not_fit_is_refused_by_its_field(changes: dict[str, Any], field: str):
    with pytest.raises(ModelError) as caught:
        parse_config({**MINICPM3, **changes})
    assert caught.value.field == field and caught.value.hint


def test_minicpm3_scales_embeddings_branches_and_logits():
    arch, attention = parse_config(MINICPM3), attention_of(MINICPM3)
    assert (attention.value_size, attention.rope.is_interleaved) == (64, False)
    assert (arch.embedding.scale, arch.head.scale) == (12.0, 0.1)
    assert arch.layers[0].residual_scale == pytest.approx(1.4 / 62**0.5)
    assert arch.tie_word_embeddings


def mixture_of(config: dict[str, Any]) -> MoEArch:
    moe = parse_config(config).layers[-1].moe
    assert moe is not None
    return moe


def test_deepseek_v2_lite_projects_queries_at_once():
    arch, attention = parse_config(V2_LITE), attention_of(V2_LITE)
    assert (attention.query_rank, attention.latent_size, attention.rope_size) == (None, 512, 64)
    assert attention.rope.is_interleaved and attention.rope.rotary_dim == 64
    assert arch.max_position_embeddings == 163840
    assert [layer.mlp is not None for layer in arch.layers] == [True] + [False] * 26
    moe = mixture_of(V2_LITE)
    assert (moe.num_experts, moe.num_chosen, moe.shared_size) == (64, 6, 2816)
    assert (moe.router.scoring, moe.router.is_normalized, moe.router.num_groups) == ("softmax", False, 1)


def test_deepseek_v3_chooses_experts_by_corrected_sigmoids_within_groups():
    arch, router = parse_config(V3), mixture_of(V3).router
    assert sum(layer.moe is not None for layer in arch.layers) == 58
    assert (router.scoring, router.group_score, router.has_correction) == ("sigmoid", "top2", True)
    assert (router.num_groups, router.num_chosen_groups, router.scale, router.is_normalized) == (8, 4, 2.5, True)


def test_kimi_k2_is_read_as_a_deepseek_v3_whose_ramp_of_yarn_is_one_pair_wide():
    yarn = {**YARN, "factor": 32, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    changes = {"model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "rope_scaling": yarn}
    arch = parse_config({**V3, **changes, "num_attention_heads": 64, "num_key_value_heads": 64})
    assert arch.max_position_embeddings == 131072 and arch.layers[-1].moe is not None


def test_groups_of_deepseek_v2_are_scored_by_their_best_expert():
    router = mixture_of({**V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}).router
    assert (router.num_groups, router.num_chosen_groups, router.group_score) == (8, 3, "max")


WRONG_MIXTURES: dict[str, tuple[dict[str, Any], str]] = {
    "no value size": ({"v_head_dim": None}, "v_head_dim"),
    "mixtures in every other layer": ({"moe_layer_freq": 2}, "moe_layer_freq"),
    "normalized weights in V2": ({"norm_topk_prob": True}, "norm_topk_prob"),
    "an unknown choice of experts": ({"topk_method": "noaux_tc"}, "topk_method"),
    "groups that do not divide": ({"topk_method": "group_limited_greedy", "n_group": 7}, "n_group"),
}


@pytest.mark.parametrize("changes, field", WRONG_MIXTURES.values(), ids=list(WRONG_MIXTURES))
def test_a_mixture_that_does_not_fit_is_refused_by_its_field(changes: dict[str, Any], field: str):
    with pytest.raises(ModelError) as caught:
        parse_config({**V2_LITE, **changes})
    assert caught.value.field == field and caught.value.hint


def test_dense_layers_of_glm_come_first():
    glm = {
        **V3,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
    }
    del glm["first_k_dense_replace"]
    kinds = ["dense"] * 2 + ["sparse"] * 59
    assert [layer.mlp is not None for layer in parse_config({**glm, "mlp_layer_types": kinds}).layers[:3]] == [1, 1, 0]
    assert parse_config(glm).layers[1].moe is not None
    with pytest.raises(ModelError, match="mixes dense and sparse layers"):
        parse_config({**glm, "mlp_layer_types": kinds[::-1]})
