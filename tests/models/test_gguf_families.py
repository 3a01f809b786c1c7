"""GGUF files of every architecture that Quire reads: the model that they describe is that of their checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.config.model_arch import ModelArch
from quire.models.gguf.registry import ARCHITECTURES
from quire.models.model_dir import read_model_dir
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.models.gguf_families import FAMILIES
from tests.models.gguf_family_files import write_family

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
# What differs from the case where the file cannot say it: windows that converters leave out, and such.
CHANGED: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "phi3": {"rope_scaling": None, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 2.8],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0], "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 1024,
    }},
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "phimoe": {"router_jitter_noise": 0.01},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "qwen3_next": {"mlp_only_layers": []},
    "granite_hybrid": {"position_embedding_type": "nope"},
    "deepseek_v2": {"rope_parameters": YARN},
    "deepseek_v3": {"rope_parameters": YARN},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
}  # fmt: skip
# Tried in `make test`; `make test-full` takes all.
USUAL = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3",
    "gpt_oss", "qwen3_5", "gemma4", "gpt2", "lfm2", "mamba2", "deepseek_v3", "granite_hybrid",
)  # fmt: skip


def shape_of(arch: ModelArch) -> list[Any]:
    """What a file and its checkpoint must agree on; not how weights are stored, nor numbers that a float32 rounds."""
    found: list[Any] = [arch.vocab_size, arch.hidden_size, arch.tie_word_embeddings, arch.embedding.num_positions]
    for layer in arch.layers:
        attention = layer.attention
        if attention is not None:
            found += [attention.num_heads, attention.num_kv_heads, attention.head_size, attention.window]
            found += [attention.qkv_bias, attention.output_bias, attention.has_sinks, attention.shares_cache_of]
            found += [attention.rope and (attention.rope.rope_type, attention.rope.rotary_dim)]
        for name, part in (*layer.mixers(), *layer.feed_forwards()):
            found += [name, part.num_weights(arch.hidden_size)]
        found += [layer.moe and (layer.moe.num_experts, layer.moe.num_chosen, layer.moe.router.is_normalized)]
        found += [layer.is_parallel, layer.mixer_norm is None, layer.ffn_norm is None, layer.ffn_post_norm is None]
    return found


@pytest.mark.parametrize("name", effort([name for name in FAMILIES if name in USUAL], list(FAMILIES)))
def test_a_file_describes_the_model_of_its_checkpoint(tmp_path: Path, name: str):
    fields = {**CASES[name].fields, **CHANGED.get(name, {})}
    dataclasses.replace(CASES[name], fields=fields).write(tmp_path / "checkpoint")
    write_family(name, tmp_path / "checkpoint", tmp_path / "model.gguf")
    found, expected = (read_model_dir(tmp_path / one).arch() for one in ("model.gguf", "checkpoint"))
    assert shape_of(found) == shape_of(expected)
    assert found.gguf_architecture == FAMILIES[name].name


def test_every_architecture_is_tried():
    assert {family.name for family in FAMILIES.values()} == set(ARCHITECTURES)
