"""`parse_config`: both styles of config.json, every family, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.families.registry import FAMILIES, parse_config
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def parse(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelArch:
    raw = {**copy.deepcopy(LLAMA), "architectures": [architecture], **fields}
    return parse_config({name: value for name, value in raw.items() if value is not ...})


def attention_of(arch: ModelArch) -> AttentionArch:
    return arch.attention_layers[0]


def windows(arch: ModelArch) -> tuple[int | None, ...]:
    return tuple(attention.window for attention in arch.attention_layers)


def test_a_llama_config_becomes_the_normal_form():
    arch = parse()
    assert (arch.architecture, arch.model_type, arch.torch_dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (arch.bos_token_id, arch.eos_token_ids, arch.tie_word_embeddings) == (1, (2, 7), False)
    rope = RopeConfig(rope_type="default", theta=10000.0, rotary_dim=8)
    attention = AttentionArch(num_heads=8, num_kv_heads=2, head_size=8, scale=8**-0.5, rope=rope)
    norm = NormArch(eps=1e-5)
    layer = LayerArch(attention=attention, mlp=MLPArch(intermediate_size=128), mixer_norm=norm, ffn_norm=norm)
    assert arch.layers == (layer,) * 4 and arch.head == HeadArch(norm=norm)


def test_transformers_5_names_mean_the_same():
    old = parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = parse(
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, torch_dtype=..., dtype="bfloat16"
    )
    assert old == new


@pytest.mark.parametrize("absent", [..., None], ids=["missing", "null"])
def test_optional_fields_have_the_defaults_of_transformers(absent: Any):
    fields = ("num_key_value_heads", "rms_norm_eps", "hidden_act", "torch_dtype", "bos_token_id", "eos_token_id")
    arch = parse(**dict.fromkeys(fields, absent))
    layer = arch.layers[0]
    assert layer.attention is not None and layer.mlp is not None and layer.mixer_norm is not None
    assert (layer.attention.num_kv_heads, layer.mixer_norm.eps, layer.mlp.activation) == (8, 1e-6, "silu")
    assert (arch.torch_dtype, arch.bos_token_id, arch.eos_token_ids) == ("", None, ())


def test_biases_follow_the_family():
    flags = {
        name: (attention.qkv_bias, attention.output_bias, layer.mlp.has_bias, attention.head_norm is not None)
        for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
        for layer in [parse(name, attention_bias=True, mlp_bias=True).layers[0]]
        for attention in [layer.attention]
    }
    assert flags == {
        "LlamaForCausalLM": (True, True, True, False),
        "MistralForCausalLM": (False, False, False, False),
        "Qwen2ForCausalLM": (True, False, False, False),
        "Qwen3ForCausalLM": (True, True, False, True),
    }


def test_the_architecture_can_come_from_the_model_type():
    assert parse(architectures=..., model_type="qwen2").architecture == "Qwen2ForCausalLM"


def test_qwen3_heads_have_128_elements_unless_said_otherwise():
    assert attention_of(parse("Qwen3ForCausalLM")).head_size == 128
    assert attention_of(parse("Qwen3ForCausalLM", head_dim=16)).head_size == 16


def test_mistral_windows_cover_all_layers_and_default_to_4096():
    assert windows(parse("MistralForCausalLM", sliding_window=100)) == (100,) * 4
    assert windows(parse("MistralForCausalLM", sliding_window=None)) == (None,) * 4
    assert windows(parse("MistralForCausalLM")) == (4096,) * 4


def test_qwen_windows_need_their_switch():
    window = {"sliding_window": 100, "max_window_layers": 3}
    assert windows(parse("Qwen2ForCausalLM", **window)) == (None,) * 4
    assert windows(parse("Qwen2ForCausalLM", use_sliding_window=True, **window)) == (None, None, None, 100)
    kinds = ["sliding_attention", "full_attention"] * 2
    arch = parse("Qwen3ForCausalLM", use_sliding_window=True, layer_types=kinds, **window)
    assert windows(arch) == (100, None, 100, None)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
        ({"rope_type": "default"}, 2048),
        (None, 2048),
    ],
    ids=["linear", "dynamic", "yarn", "yarn without original", "llama3", "default", "none"],
)
def test_the_longest_sequence_includes_rope_scaling(scaling: dict[str, Any] | None, longest: int):
    assert parse(rope_scaling=scaling).max_position_embeddings == longest


def test_a_kind_of_layer_may_have_its_own_rope():
    raw = {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "x": {}}}
    rope, longest = parse_rope(FieldReader(raw), 16, 100, kind="full_attention")
    assert (rope.rope_type, rope.rotary_dim, longest) == ("proportional", 16, 100)
    assert dict(rope.parameters) == {"factor": 1.0, "share": 0.25}
    with pytest.raises(ModelError, match="per kind of layer"):
        parse_rope(FieldReader(raw), 16, 100, kind="sliding_attention")


def test_rope_numbers_are_kept():
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False, "beta_fast": None}
    assert dict(attention_of(parse(rope_scaling=scaling)).rope.parameters) == {
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": 0.0,
        "attention_factor": 1.5,
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["LlamaForCausalML"]},
        "architecture 'LlamaForCausalML' is not implemented",
    ),
    "unlike any architecture": ({"architectures": ["XyzzyNet"]}, "Quire has LlamaForCausalLM, "),
    "no architecture": ({"architectures": ..., "model_type": ...}, "architectures is missing"),
    "architectures no list": ({"architectures": "LlamaForCausalLM"}, "list of strings"),
    "quantized otherwise": ({"quantization_config": {"quant_method": "quip"}}, "quant_method is 'quip'"),
    "no vocab_size": ({"vocab_size": ...}, "vocab_size is missing"),
    "negative vocab_size": ({"vocab_size": -5}, "vocab_size is -5"),
    "huge vocab_size": ({"vocab_size": 2**40}, "from 1 to"),
    "vocab_size of 40000 bits": ({"vocab_size": 1 << 40000}, "bits"),
    "vocab_size a text": ({"vocab_size": "1000"}, "must be an integer"),
    "vocab_size a bool": ({"vocab_size": True}, "must be an integer"),
    "vocab_size a fraction": ({"vocab_size": 10.5}, "must be an integer"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "too many layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    "heads not divisible": ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, "does not divide"),
    "hidden not divisible": ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is 64"),
    "odd head": ({"head_dim": 9}, "even number"),
    "huge head": ({"head_dim": 4096}, "head_dim is 4096"),
    "nan eps": ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    "infinite theta": ({"rope_theta": math.inf}, "rope_theta is inf"),
    "text theta": ({"rope_theta": "1e4"}, "must be a number"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "flag a text": ({"tie_word_embeddings": "false"}, "true or false"),
    "eos beyond vocabulary": ({"eos_token_id": 1000}, "from 0 to 999"),
    "eos a text": ({"eos_token_id": "</s>"}, "integer or a list"),
    "unknown dtype": ({"torch_dtype": "int4"}, "known: bfloat16, float16, float32"),
    "rope no object": ({"rope_scaling": "yarn"}, "must be an object"),
    "unknown rope": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "known: default, dynamic"),
    "longrope without factors": ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
    "longrope with a factor too few": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}},
        "a list of 4 numbers",
    ),
    "rope without type": ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope factor below 1": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
    "llama3 without numbers": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "llama3 bands crossed": (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "above low_freq_factor",
    ),
    "yarn betas crossed": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "at least beta_slow"),
    "rope per layer kind": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
    "two ropes": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "both set and differ",
    ),
    "absurd length": ({"rope_scaling": {"type": "linear", "factor": 60000.0}}, "at most"),
    "layer_types too short": ({"layer_types": ["full_attention"]}, "names 1 layers"),
    "layer_types unknown": ({"layer_types": ["linear_attention"] * 4}, "known: full_attention"),
    "layer_types at odds": ({"layer_types": ["sliding_attention"] * 4}, "says layer 0 is sliding_attention"),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_field_is_refused_by_name_with_a_hint(fields: dict[str, Any], said: str):
    with pytest.raises(ModelError) as caught:
        parse_config({k: v for k, v in {**LLAMA, **fields}.items() if v is not ...})
    assert said in str(caught.value)
    assert caught.value.hint and caught.value.field


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
NAMES = [*LLAMA, "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "layer_types", "dtype"]


@settings(deadline=None, max_examples=300)
@given(fields=st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=4), architecture=st.sampled_from([*FAMILIES]))
def test_junk_is_parsed_or_refused_but_never_crashes(fields: dict[str, Any], architecture: str):
    try:
        arch = parse_config({**LLAMA, "architectures": [architecture], "use_sliding_window": True, **fields})
    except ModelError:
        return
    assert isinstance(arch, ModelArch)
    assert len(arch.layers) == arch.num_layers
    assert all(attention.num_heads % attention.num_kv_heads == 0 for attention in arch.attention_layers)
