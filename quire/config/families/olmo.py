"""OLMo 2 and 3: norms on outputs instead of inputs, and on all queries and all keys of a token as one vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import read_max_positions, read_windows
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope, parse_rope_of_windows
from quire.config.model_arch import AttentionArch, ModelArch


class Olmo2(Llama):
    """Source: OLMo Team 2025 (2 OLMo 2 Furious), section 2."""

    tensor_names = (
        (r"\.mixer_post_norm\.", ".post_attention_layernorm."),
        (r"\.ffn_post_norm\.", ".post_feedforward_layernorm."),
    )
    defaults: ClassVar[Mapping[str, object]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        return with_layers(
            super().parse(raw),
            lambda _, layer: dataclasses.replace(
                layer, mixer_norm=None, ffn_norm=None, mixer_post_norm=layer.mixer_norm, ffn_post_norm=layer.ffn_norm
            ),
        )

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms."""
        return dataclasses.replace(super().attention(config, attention), head_norm=cls.norm(config), has_row_norm=True)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False


class Olmo3(Olmo2):
    """Windows on three of four layers; the fourth alone has rope scaling."""

    defaults: ClassVar[Mapping[str, object]] = {**Olmo2.defaults, "rope_theta": 500000.0}

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """By kind of layer."""
        longest = read_max_positions(config)
        if window is not None:
            theta = config.number("rope_theta", 2.0, 1e15)
            return parse_rope_of_windows(config, head_size, longest, theta)
        return parse_rope(config, head_size, longest, kind="full_attention")

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of all layers but every fourth."""
        return read_windows(config, num_layers, 4)
