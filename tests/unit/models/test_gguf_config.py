"""What the metadata of a GGUF file says of a model: as config.json, as its shape, and what is refused by its key."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.model_arch import ModelArch
from quire.errors import ModelError, UnsupportedError, WeightsError
from quire.formats.block_formats import BLOCK_FORMATS
from quire.models.gguf.registry import ARCHITECTURES
from quire.models.model_dir import read_model_dir
from tests.unit.formats.gguf_bytes import ARRAY, BOOL, F32, FLOAT32, UINT32, Parts, array, pair, tensor, text, u32

LLAMA: Mapping[str, Any] = {
    "block_count": 2, "context_length": 512, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8, "rope.freq_base": 500000.0,
}  # fmt: skip
EMBEDDING = {"token_embd.weight": (32, 11)}


def packed(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key, value)
    if isinstance(value, bool):
        return pair(key, BOOL, bytes([value]))
    if isinstance(value, list):
        return pair(key, ARRAY, array(UINT32, [u32(one) for one in value]))
    return pair(key, FLOAT32, struct.pack("<f", value)) if isinstance(value, float) else pair(key, UINT32, u32(value))


def write(
    directory: Path,
    architecture: str = "llama",
    keys: Mapping[str, Any] = LLAMA,
    tensors: Mapping[str, tuple[int, ...]] = EMBEDDING,
    **general: Any,
) -> Path:
    """A file of these keys of the architecture, other keys with __ for dots, and tensors of ones."""
    pairs = [text("general.architecture", architecture)]
    pairs += [packed(f"{architecture}.{name}", value) for name, value in keys.items()]
    pairs += [packed(name.replace("__", "."), value) for name, value in general.items()]
    entries, offset = [], 0
    for name, dimensions in tensors.items():
        entries.append(tensor(name, dimensions, F32, offset))
        offset += -(-4 * int(np.prod(dimensions)) // 32) * 32
    path = directory / "model.gguf"
    path.write_bytes(
        Parts(pairs=tuple(pairs), tensors=tuple(entries), data=np.ones(offset // 4, "<f4").tobytes()).file()
    )
    return path


def arch_of(path: Path, **settings: Any) -> ModelArch:
    return read_model_dir(path).arch(**settings)


def test_metadata_becomes_a_config_json(tmp_path: Path):
    path = write(
        tmp_path, tokenizer__ggml__eos_token_id=7, tokenizer__ggml__eot_token_id=9, general__sampling__temp=0.5
    )
    found = read_model_dir(path)
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert (found.config["vocab_size"], found.config["head_dim"], found.config["eos_token_id"]) == (11, 8, [7, 9])
    assert found.generation_config == {"temperature": 0.5}
    arch = found.arch({"max_position_embeddings": 256})
    assert (arch.gguf_architecture, arch.max_position_embeddings, arch.num_layers) == ("llama", 256, 2)
    assert arch.tie_word_embeddings
    attention = arch.attention_layers[0]
    assert attention.rope is not None
    assert attention.rope.is_interleaved and attention.rope.theta == 500000.0
    assert not attention.qkv_bias


def test_what_keys_leave_out_tensors_say(tmp_path: Path):
    bias = {"blk.0.attn_q.bias": (32,), "blk.0.ffn_down.bias": (32,), "output.weight": (32, 11)}
    arch = arch_of(write(tmp_path, tensors={**EMBEDDING, **bias}))
    layer = arch.layers[0]
    assert layer.attention is not None and layer.mlp is not None
    assert (layer.attention.qkv_bias, layer.mlp.has_bias, arch.tie_word_embeddings) == (True, True, False)


def test_a_llama_with_experts_is_a_mixtral(tmp_path: Path):
    arch = arch_of(write(tmp_path, keys={**LLAMA, "expert_count": 8, "expert_used_count": 2}))
    assert arch.architecture == "MixtralForCausalLM"
    assert arch.layers[0].moe is not None and arch.layers[0].moe.num_experts == 8


@pytest.mark.parametrize(
    ("keys", "tensors", "kind", "parameters"),
    [
        ({}, {}, "default", {}),
        ({"rope.scaling.type": "none"}, {}, "default", {}),
        ({"rope.scaling.factor": 4.0}, {}, "linear", {"factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {}, "linear", {"factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, "linear", {"factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {},
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({}, {"rope_freqs.weight": (4,)}, "longrope", {"attention_factor": 1.0}),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 128,
             "rope.scaling.attn_factor": 1.25},
            {"rope_factors_long.weight": (4,), "rope_factors_short.weight": (4,)},
            "longrope",
            {"attention_factor": 1.25, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["none", "said to be none", "factor", "old factor", "linear", "yarn", "frequencies", "longrope"],
)  # fmt: skip
def test_rope_scaling_is_read(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, tuple[int, ...]], kind: str, parameters: dict[str, float]
):
    rope = arch_of(write(tmp_path, keys={**LLAMA, **keys}, tensors={**EMBEDDING, **tensors})).attention_layers[0].rope
    assert rope is not None
    assert rope.rope_type == kind
    assert parameters.items() <= dict(rope.parameters).items()
    assert rope.short_factors == ((1.0,) * 4 if kind == "longrope" else ())


def test_windows_are_those_of_the_pattern_or_of_the_period(tmp_path: Path):
    gemma = {**LLAMA, "block_count": 4, "attention.sliding_window": 16, "attention.key_length": 8}
    windows = [layer.window for layer in arch_of(write(tmp_path, "gemma2", gemma)).attention_layers]
    assert windows == [16, None, 16, None]
    by_layer = {**gemma, "attention.sliding_window_pattern": [1, 1, 0, 0]}
    windows = [layer.window for layer in arch_of(write(tmp_path, "gemma3", by_layer)).attention_layers]
    assert windows == [16, 16, None, None]
    by_period = {**gemma, "attention.sliding_window_pattern": 3}
    windows = [layer.window for layer in arch_of(write(tmp_path, "gemma3", by_period)).attention_layers]
    assert windows == [16, 16, None, 16]


def test_the_largest_gemmas_scale_scores_as_if_heads_divided_the_hidden_size(tmp_path: Path):
    for name, num_layers, size in (("gemma2", 46, 8), ("gemma2", 42, 16), ("gemma3", 62, 8), ("gemma3", 48, 16)):
        keys = {**LLAMA, "block_count": num_layers, "attention.key_length": 16, "rope.dimension_count": 16}
        assert arch_of(write(tmp_path, name, keys)).attention_layers[0].scale == pytest.approx(size**-0.5)


# What is wrong -> keys that differ, other keys, tensors, field of the error, part of the message.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]], str, str]] = {
    "no layers": ({"block_count": 0}, {}, {}, "llama.block_count", "from 1 to 1000"),
    "layers beyond count": ({"block_count": 1 << 31}, {}, {}, "llama.block_count", "from 1 to 1000"),
    "a word for a number": ({"block_count": "two"}, {}, {}, "llama.block_count", "must be an integer"),
    "an array for a number": ({"embedding_length": [1, 2]}, {}, {}, "llama.embedding_length", "an array of 2"),
    "a number for a word": ({"rope.scaling.type": 3}, {}, {}, "llama.rope.scaling.type", "must be a string"),
    "unknown scaling": ({"rope.scaling.type": "odd"}, {}, {}, "llama.rope.scaling.type", "known: none, linear"),
    "heads that do not divide": ({"attention.head_count_kv": 3}, {}, {}, "llama.attention.head_count_kv", "divide"),
    "heads by layer": ({"attention.head_count": [4, 2]}, {}, {}, "llama.attention.head_count", "differs between"),
    "too few layers": ({"attention.head_count": [4]}, {}, {}, "llama.attention.head_count", "2 layers"),
    "a huge head": ({"attention.key_length": 4096}, {}, {}, "llama.attention.key_length", "from 1 to 512"),
    "values of another size": (
        {"attention.key_length": 8, "attention.value_length": 16}, {}, {}, "llama.attention.value_length", "equal"
    ),
    "an encoder": ({"attention.causal": False}, {}, {}, "llama.attention.causal", "encoders"),
    "an epsilon of 7": ({"attention.layer_norm_rms_epsilon": 7.0}, {}, {}, "llama.attention.layer_norm_rms_epsilon",
                        "from 1e-12"),
    "not a number": ({"rope.freq_base": float("nan")}, {}, {}, "llama.rope.freq_base", "from 2"),
    "more experts of a token than there are": (
        {"expert_count": 4, "expert_used_count": 5}, {}, {}, "llama.expert_used_count", "from 1 to 4"
    ),
    "factors of another length": ({}, {}, {"rope_freqs.weight": (3,)}, "short_factor", "list of 4 numbers"),
    "factors beside yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, {}, {"rope_freqs.weight": (4,)},
        "rope_freqs.weight", "one kind of scaling",
    ),
    "factors as a matrix": ({}, {}, {"rope_freqs.weight": (2, 2)}, "rope_freqs.weight", "list of F32"),
    "an embedding without rows": ({}, {}, {"token_embd.weight": (32,)}, "token_embd.weight", "no rows"),
    "a projector": ({}, {"general__type": "mmproj"}, {}, "general.type", "not a language model"),
    "an adapter": ({}, {"general__type": "adapter"}, {}, "general.type", "not a language model"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "general", "tensors", "field", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_value_that_cannot_be_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, Any], general: dict[str, Any], tensors: dict[str, Any], field: str, said: str
):
    path = write(tmp_path, keys={**LLAMA, **keys}, tensors={**EMBEDDING, **tensors}, **general)
    with pytest.raises(ModelError) as caught:
        arch_of(path)
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "feed_forward_length",
                                 "attention.head_count", "attention.layer_norm_rms_epsilon"])  # fmt: skip
def test_a_missing_key_is_named(tmp_path: Path, key: str):
    with pytest.raises(ModelError) as caught:
        arch_of(write(tmp_path, keys={name: value for name, value in LLAMA.items() if name != key}))
    assert caught.value.field in (f"llama.{key}", "llama.attention.layer_norm_epsilon")
    assert "missing" in str(caught.value)


def test_an_unknown_architecture_is_refused_before_weights_are_read(tmp_path: Path):
    path = write(tmp_path, "rwkv7", tensors={})
    with pytest.raises(ModelError, match="'rwkv7' is not supported in GGUF files") as caught:
        read_model_dir(path)
    assert "qwen3" in str(caught.value.hint)
    with pytest.raises(ModelError, match="did you mean 'qwen3moe'"):
        read_model_dir(write(tmp_path, "qwen3-moe"))


def test_variants_that_quire_has_not_are_refused(tmp_path: Path):
    for name, keys, tensors, said in (
        ("deepseek2", {"expert_gating_func": 4, "attention.key_length_mla": 16}, {}, "scored by softmax"),
        ("glm4", {"rope.dimension_sections": [2, 2]}, {}, "text alone"),
        ("mpt", {}, {"position_embd.weight": (32, 4)}, "only MPTs without it"),
    ):
        with pytest.raises(ModelError) as caught:
            arch_of(write(tmp_path, name, {**LLAMA, **keys}, {**EMBEDDING, **tensors}))
        assert said in str(caught.value), name


def test_classes_of_transformers_do_not_read_gguf(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="does not read GGUF"):
        arch_of(write(tmp_path), model_impl="transformers")


def test_cve_2026_7482_tensors_larger_than_the_file_are_refused_before_they_are_read(tmp_path: Path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WeightsError, match=r"token_embd\.weight lies at bytes 0 to 1408 of the data, which has 1404"):
        read_model_dir(path)


def test_the_page_names_every_architecture_and_every_type():
    page = (Path(__file__).parents[3] / "docs/reference/gguf.md").read_text()
    table = page.partition("## Architectures")[2].partition("##")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) >= set(ARCHITECTURES)
    types = page.partition("## Types of tensors")[2]
    assert all(re.search(rf"\b{name}\b", types) for name in BLOCK_FORMATS)
