"""Rotary tables: every variant against transformers, and what `dynamic` does past the original length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config.families.registry import parse_config
from quire.config.hf_rope import RopeConfig
from quire.errors import ModelError
from quire.layers.rope import RotaryEmbedding, query_scales, rotary_angles, rows_of_halves
from quire.layers.weight_target import ReorderedTarget, TensorTarget

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
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)],
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
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
    "longrope past the original length": LONGROPE,
    "longrope with a given scale": {**LONGROPE, "attention_factor": 1.3, "factor": 4.0},
}


def ours(scaling: dict[str, Any]) -> RotaryEmbedding:
    arch = parse_config({"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_scaling": scaling})
    rope = arch.attention_layers[0].rope
    assert rope is not None
    return RotaryEmbedding(rope, NUM_POSITIONS, torch.device("cpu"))


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


def test_longrope_served_within_the_original_length_equals_transformers_there():
    arch = parse_config({"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_scaling": LONGROPE})
    positions = torch.arange(64)
    assert_same(
        rows(RotaryEmbedding(arch.attention_layers[0].rope, 64, torch.device("cpu")), positions),
        theirs(LONGROPE)(torch.zeros(1), positions[None]),
    )


def test_longrope_may_have_a_scale_for_each_of_its_lengths():
    scaling = {**LONGROPE, "short_mscale": 1.5, "long_mscale": 2.5, "type": "su"}
    del scaling["rope_type"]
    arch = parse_config({"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_scaling": scaling})
    rope = arch.attention_layers[0].rope
    assert rope is not None and rotary_angles(rope, 64)[1] == 1.5 and rotary_angles(rope, 65)[1] == 2.5


def test_factors_on_queries_step_up_with_the_position():
    scales = query_scales(20, 0.1, 8.0)
    assert torch.equal(scales[:8], torch.ones(8)) and scales[8] == scales[15] == 1 + 0.1 * torch.log(torch.tensor(2.0))
    assert torch.equal(query_scales(19, 0.1, 8.0, first=1), scales[1:])
    rope = RotaryEmbedding(None, 20, torch.device("cpu"), scales)
    x = torch.randn(3, 2, 8)
    rotation = rope(torch.tensor([0, 4, 9]))
    assert torch.equal(rotation.rotate(x), x) and torch.equal(rotation.scale(x)[:2], x[:2])
    assert torch.equal(rotation.scale(x)[2], x[2] * scales[9])


def test_interleaved_pairs_become_halves_when_rows_are_loaded_in_order():
    num_heads, head_size, rotary_dim = 2, 10, 6
    weight, x = torch.randn(num_heads * head_size, 4), torch.randn(3, 4)
    loaded = torch.empty_like(weight)
    target = ReorderedTarget(TensorTarget(loaded), rows_of_halves(num_heads, head_size, rotary_dim))
    assert target.load(weight) and torch.equal(target.stored(), weight)
    rope = RotaryEmbedding(RopeConfig(theta=100.0, rotary_dim=rotary_dim), 10, torch.device("cpu"))
    rotation = rope(torch.tensor([0, 4, 9]))
    halves = rotation.rotate((x @ loaded.T).view(3, num_heads, head_size))
    heads = (x @ weight.T).view(3, num_heads, head_size)
    angles = torch.complex(rope.cos, rope.sin)[rotation.positions].unsqueeze(1)
    turned = torch.view_as_complex(heads[..., :rotary_dim].reshape(3, num_heads, -1, 2)) * angles
    expected = torch.cat((turned.real, turned.imag, heads[..., rotary_dim:]), dim=-1)
    assert torch.allclose(halves, expected, atol=1e-5)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ModelError, match="spiral"):
        rotary_angles(RopeConfig(rope_type="spiral", rotary_dim=8), 4)
