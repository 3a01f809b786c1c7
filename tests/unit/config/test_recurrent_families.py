"""config.json of models with recurrent layers: which layer is what, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.families.registry import parse_config
from quire.config.model_arch import ModelArch
from quire.errors import ModelError

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "linear_num_value_heads": 16, "rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    },
    "vision_config": {"hidden_size": 9},
}  # fmt: skip
LFM: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "block_ff_dim": 600,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "full_attn_idxs": [1, 3],
}  # fmt: skip


def parse_qwen(**fields: Any) -> ModelArch:
    return parse_config({**QWEN, "text_config": {**QWEN["text_config"], **fields}})


def test_every_fourth_layer_of_qwen3_5_is_attention_with_an_output_gate():
    arch = parse_qwen()
    assert [layer.attention is not None for layer in arch.layers] == [False, False, False, True] * 2
    assert [layer.delta_net is not None for layer in arch.layers] == [True, True, True, False] * 2
    attention, delta_net = arch.layers[3].attention, arch.layers[0].delta_net
    assert attention is not None and attention.rope is not None and delta_net is not None
    assert attention.has_output_gate and attention.head_size == 256
    assert attention.rope.rotary_dim == 64 and attention.rope.theta == 1e7
    assert delta_net.conv_width == 2 * 16 * 128 + 16 * 128 and delta_net.conv_size == 4
    assert arch.layers[0].mixer_norm is not None and arch.layers[0].mixer_norm.gain_offset == 1.0


def test_the_kinds_of_layers_can_be_named():
    kinds = ["full_attention", "linear_attention"] * 4
    assert [layer.delta_net is not None for layer in parse_qwen(layer_types=kinds).layers] == [False, True] * 4
    assert [layer.attention is not None for layer in parse_qwen(full_attention_interval=2).layers] == [False, True] * 4


def test_lfm2_has_attention_where_it_is_named_and_two_thirds_of_its_intermediate_size():
    arch = parse_config(LFM)
    assert [layer.short_conv is not None for layer in arch.layers] == [True, False, True, False]
    assert arch.layers[0].mlp is not None and arch.layers[0].mlp.intermediate_size == 512
    assert arch.tie_word_embeddings and arch.layers[1].attention is not None
    assert arch.layers[1].attention.rope is not None and arch.layers[1].attention.rope.theta == 1e6
    kept = parse_config({**LFM, "block_auto_adjust_ff_dim": False, "tie_embedding": False, "layer_types": ["conv"] * 4})
    assert kept.layers[0].mlp is not None and kept.layers[0].mlp.intermediate_size == 600
    assert not kept.tie_word_embeddings and kept.attention_layers == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_key_heads"),
        ({"linear_value_head_dim": 24}, "linear_value_head_dim"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"layer_types": ["linear_attention"] * 7}, "layer_types"),
        ({"layer_types": ["mamba"] * 8}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        parse_qwen(**fields)


def test_mixtures_have_experts_where_they_are_not_said_to_be_dense():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shared = {**QWEN["text_config"], **experts, "shared_expert_intermediate_size": 48}
    arch = parse_config({"architectures": ["Qwen3NextForCausalLM"], **shared, "mlp_only_layers": [2]})
    assert [layer.moe is None for layer in arch.layers] == [False, False, True] + [False] * 5
    assert arch.layers[0].moe is not None and arch.layers[0].moe.shared_size == 48
    assert arch.layers[0].moe.has_shared_gate and arch.layers[0].moe.router.is_normalized
    arch = parse_config({**LFM, "architectures": ["Lfm2MoeForCausalLM"], "intermediate_size": 600, **experts})
    assert [layer.moe is None for layer in arch.layers] == [True, True, False, False]
