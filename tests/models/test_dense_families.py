"""Dense families against transformers in float32, on torch and on native kernels, whole and one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.config.families.registry import parse_config
from quire.errors import ModelError
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.kernels import TorchKernels
from quire.layers.native import NativeKernels
from quire.models.model_dir import read_model_dir
from tests.models.checkpoints import COMMON
from tests.models.dense import DENSE, GEMMA4_EXPERTS, make_dense, text_config, write_random
from tests.models.stepping import Stepper
from tests.models.test_families import assert_close, random_ids, reference_logprobs
from tests.models.test_mixtures import load

NUM_TOKENS = 130
YARN_OF_OLMO = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 5000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in DENSE},
    "Gemma4 with keys that are values": (
        "Gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        },
    ),
    "Gemma4 with experts": ("Gemma4", GEMMA4_EXPERTS),
    "Cohere with norms of heads": ("Cohere", {"use_qk_norm": True}),
    "StableLm with norms of heads": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "Exaone4 without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "Granite with biases": ("Granite", {"attention_bias": True, "mlp_bias": True}),
    "Olmo3 with yarn": ("Olmo3", {"rope_parameters": {"full_attention": YARN_OF_OLMO}}),
    "SmolLM3 with windows": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 20}),
    "StableLm in parallel": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "Starcoder2 without biases": ("Starcoder2", {"use_bias": False, "sliding_window": None}),
}


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(num_threads=1)


@pytest.mark.parametrize(("family", "fields"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logprobs_equal_those_of_transformers(
    tmp_path: Path, runtime: NativeRuntime, family: str, fields: dict[str, Any]
):
    reference = make_dense(family, tmp_path, **fields)
    long, short = random_ids(NUM_TOKENS, seed=1), random_ids(30, seed=2)
    expected = reference_logprobs(reference, long), reference_logprobs(reference, short)
    for kernels in (TorchKernels(), NativeKernels(runtime, torch.float32)):
        stepper = Stepper(load(tmp_path, kernels))
        whole = stepper.step([(stepper.add(ids), len(ids)) for ids in (long, short)])
        for logits, logprobs in zip(whole, expected, strict=True):
            assert_close(logits, logprobs)
        sequence = stepper.add(long)
        parts = [stepper.step([(sequence, count)])[0] for count in (100, 7, 1, 1, 1)]
        assert_close(torch.cat(parts), expected[0][:110])


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
# Class in transformers -> fields of its config, and the family of its text model.
CONDITIONAL: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma3": ({"mm_tokens_per_image": 4, "image_token_index": 3}, "Gemma3"),
    "Gemma4": ({"audio_config": None}, "Gemma4"),
    "Mistral3": ({"image_token_index": 3, "spatial_merge_size": 1}, "Ministral3"),
}


@pytest.mark.parametrize("name", CONDITIONAL)
def test_text_models_within_vision_models_are_those_families(tmp_path: Path, name: str):
    fields, text = CONDITIONAL[name]
    inner = text_config(text, pad_token_id=0)
    config = getattr(transformers, f"{name}Config")(
        text_config=inner.to_dict(), vision_config=VISION, tie_word_embeddings=inner.tie_word_embeddings,
        **fields,
    )  # fmt: skip
    reference = write_random(getattr(transformers, f"{name}ForConditionalGeneration")(config), tmp_path)
    ids = random_ids(60, seed=1)
    stepper = Stepper(load(tmp_path, TorchKernels()))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert_close(logits, reference_logprobs(reference, ids))


def test_longrope_past_the_original_length_has_the_long_factors(tmp_path: Path):
    reference = make_dense("Phi3", tmp_path, original_max_position_embeddings=64)
    ids = random_ids(NUM_TOKENS, seed=1)
    stepper = Stepper(load(tmp_path, TorchKernels()))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert_close(logits, reference_logprobs(reference, ids))


def test_config_files_of_older_releases_mean_the_same(tmp_path: Path):
    make_dense("Gemma3", tmp_path)
    raw = read_model_dir(tmp_path).config
    old = {key: value for key, value in raw.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3}
    assert parse_config({**old, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}) == parse_config(raw)
    phi = {**COMMON, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 1024}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    old_names = [
        parse_config({**phi, "rope_scaling": {"type": name, **factors}}) for name in ("su", "yarn", "longrope")
    ]
    assert old_names[0] == old_names[1] == old_names[2]


def test_a_text_config_that_leaves_out_defaults_is_complete():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # fmt: skip
    arch = parse_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    assert (arch.max_position_embeddings, arch.vocab_size, arch.tie_word_embeddings) == (131072, 262208, True)
    local, wide = arch.layers[0].attention, arch.layers[5].attention
    assert local is not None and wide is not None and local.rope is not None and wide.rope is not None
    assert (local.window, local.rope.theta, local.rope.rope_type) == (1024, 1e4, "default")
    assert (wide.window, wide.rope.theta, wide.rope.rope_type) == (None, 1e6, "linear")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Gemma", {"use_bidirectional_attention": True}),
        ("SmolLM3", {"no_rope_layers": [1]}),
        ("Gemma2", {"layer_types": ["full_attention"]}),
        ("Gemma4", {"top_k_experts": 9, **{key: GEMMA4_EXPERTS[key] for key in ("enable_moe_block", "num_experts")}}),
        ("Gemma4", {"use_bidirectional_attention": "all"}),
        ("Gemma4", {"num_kv_shared_layers": 3}),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_its_field(family: str, fields: dict[str, Any]):
    raw = {**COMMON, **DENSE[family], "architectures": [f"{family}ForCausalLM"], **fields}
    with pytest.raises(ModelError, match=next(iter(fields))):
        parse_config(raw)


@pytest.mark.parametrize("quantization", [None, "int4"], ids=str)
def test_a_token_has_the_same_bits_whichever_tokens_pass_the_feed_forward_network_with_it(
    tmp_path: Path, runtime: NativeRuntime, quantization: str | None
):
    make_dense("Olmo2", tmp_path)
    ids = random_ids(50, seed=1)
    steps = []
    for rows_at_once in (len(ids), 7):
        kernels = NativeKernels(runtime, torch.float32, quantization)
        kernels.rows_at_once = rows_at_once
        stepper = Stepper(load(tmp_path, kernels))
        steps.append(stepper.step([(stepper.add(ids), len(ids))])[0])
    assert torch.equal(*steps)


@pytest.mark.parametrize("family", ["Granite", "Gemma2", "Gemma4", "Olmo2", "Cohere"])
def test_wanted_tokens_have_the_bits_that_they_have_among_all(tmp_path: Path, runtime: NativeRuntime, family: str):
    make_dense(family, tmp_path)
    long, short = random_ids(40, seed=1), random_ids(10, seed=2)
    stepper = Stepper(load(tmp_path, NativeKernels(runtime, torch.float32)))

    def step(wanted: list[int] | None) -> torch.Tensor:
        return torch.cat(stepper.step([(stepper.add(ids), len(ids)) for ids in (long, short)], wanted))

    whole = step(None)
    for wanted in ([39, 49], [0, 17, 40], []):
        assert torch.equal(step(wanted)[wanted], whole[wanted])
