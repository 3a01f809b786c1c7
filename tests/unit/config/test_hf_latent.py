"""Families with latent attention: what config.json says, and what is refused with the name of the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.config.families.registry import parse_config
from quire.config.model_arch import LatentAttentionArch
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
    "weights of eight bits": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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
