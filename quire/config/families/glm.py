"""Families that rotate pairs of neighbours: ERNIE 4.5; GLM-4, which rotates half of each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import read_max_positions
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope
from quire.config.model_arch import AttentionArch, ModelArch
from quire.config.model_family import LLAMA_NAMES


class Ernie(Llama):
    """A Llama whose rotated pairs are neighbours. Source: Baidu 2025 (ERNIE 4.5), section 2."""

    defaults: ClassVar[Mapping[str, object]] = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    is_tied = True

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """Pairs are neighbours."""
        rope, longest = parse_rope(config, head_size, read_max_positions(config))
        return dataclasses.replace(rope, is_interleaved=True), longest

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """One flag for all biases."""
        has_bias = config.flag("use_bias", False)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """As attention."""
        return config.flag("use_bias", False)


class Glm(Llama):
    """Gates and ups are stored as one tensor. Source: GLM Team 2024 (ChatGLM), section 2."""

    defaults: ClassVar[Mapping[str, object]] = {
        "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True,
    }  # fmt: skip
    layouts: ClassVar[Mapping[str, str]] = {"mlp.gate_up_proj": "concatenated"}

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """Pairs are neighbours."""
        rope, longest = parse_rope(config, head_size, read_max_positions(config))
        return dataclasses.replace(rope, is_interleaved=True), longest

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With biases on queries, keys and values."""
        return dataclasses.replace(super().attention(config, attention), output_bias=False)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False


class Glm4(Glm):
    """GLM-4-0414: norms on inputs and outputs."""

    tensor_names = (
        *LLAMA_NAMES,
        (r"\.mixer_post_norm\.", ".post_self_attn_layernorm."),
        (r"\.ffn_post_norm\.", ".post_mlp_layernorm."),
    )

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        return with_layers(
            super().parse(raw),
            lambda _, layer: dataclasses.replace(layer, mixer_post_norm=layer.mixer_norm, ffn_post_norm=layer.ffn_norm),
        )
