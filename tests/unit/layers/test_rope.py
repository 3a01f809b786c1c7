"""Rotary tables: every variant against transformers, and what `dynamic` does past the original length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config.hf_config import parse_hf_config
from quire.config.hf_rope import RopeConfig
from quire.errors import ModelError
from quire.layers.rope import RotaryEmbedding, rotary_angles

NUM_POSITIONS = 300
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with all its numbers": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "yarn with a given scale": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8},
}


def ours(scaling: dict[str, Any]) -> RotaryEmbedding:
    arch = parse_hf_config({"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_scaling": scaling})
    return RotaryEmbedding(arch.rope, NUM_POSITIONS, torch.device("cpu"))


def theirs(scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**SHAPE, rope_scaling=dict(scaling)))


def rows(rope: RotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.cos[positions], rope.sin[positions]


def assert_same(mine: tuple[torch.Tensor, torch.Tensor], reference: tuple[torch.Tensor, torch.Tensor]) -> None:
    for table, expected in zip(mine, reference, strict=True):
        difference = (table - expected[0, :, : table.shape[-1]]).abs().max().item()
        assert difference <= 2e-5, difference  # float32 angles of up to 300 radians


@pytest.mark.parametrize("scaling", VARIANTS.values(), ids=VARIANTS.keys())
def test_tables_equal_those_of_transformers(scaling: dict[str, Any]):
    positions = torch.arange(NUM_POSITIONS)
    assert_same(rows(ours(scaling), positions), theirs(scaling)(torch.zeros(1), positions[None]))


def test_dynamic_is_plain_within_the_original_length():
    scaling, positions = {"rope_type": "dynamic", "factor": 2.0}, torch.arange(128)
    assert_same(rows(ours(scaling), positions), theirs(scaling)(torch.zeros(1), positions[None]))
    assert torch.equal(ours(scaling).cos[:128], ours({"rope_type": "default"}).cos[:128])


def test_dynamic_tokens_generated_past_the_original_length_equal_those_of_transformers():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    rope, reference = ours(scaling), theirs(scaling)
    for position in range(120, NUM_POSITIONS):
        positions = torch.tensor([position])
        assert_same(rows(rope, positions), reference(torch.zeros(1), positions[None]))


def test_a_row_depends_on_its_position_alone():
    rope = ours({"rope_type": "dynamic", "factor": 2.0})
    together = rows(rope, torch.tensor([5, 250, 5, 131]))[0]
    alone = torch.cat([rows(rope, torch.tensor([position]))[0] for position in (5, 250, 5, 131)])
    assert torch.equal(together, alone)


def test_part_of_a_head_can_be_rotated():
    rope = RotaryEmbedding(RopeConfig(theta=100.0, rotary_dim=4), 10, torch.device("cpu"))
    x = torch.randn(3, 2, 8)
    rotated = rope(torch.tensor([0, 4, 9])).rotate(x)
    assert torch.equal(rotated[..., 4:], x[..., 4:]) and torch.equal(rotated[0], x[0])
    assert not torch.equal(rotated[1:, :, :4], x[1:, :, :4])


def test_an_unknown_variant_is_refused():
    with pytest.raises(ModelError, match="longrope"):
        rotary_angles(RopeConfig(rope_type="longrope", rotary_dim=8), 4)
