"""Cohere's Command R and Command R7B/A: attention and MLP beside each other after one LayerNorm without biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import read_max_positions, read_norm_eps, read_windows
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope
from quire.config.model_arch import AttentionArch, ModelArch, NormArch


class Cohere(Llama):
    """Source: Cohere 2024 (Command R), as released."""

    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 500000.0}
    is_tied = True

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        arch = with_layers(
            super().parse(raw), lambda _, layer: dataclasses.replace(layer, is_parallel=True, ffn_norm=None)
        )
        scale = config.number("logit_scale", 1e-6, 1e6, 0.0625)
        return dataclasses.replace(arch, head=dataclasses.replace(arch.head, scale=scale))

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """Without a bias."""
        return NormArch(eps=read_norm_eps(config, "layer_norm_eps", 1e-5), is_centered=True)

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """Pairs are neighbours."""
        rope, longest = parse_rope(config, head_size, read_max_positions(config))
        return dataclasses.replace(rope, is_interleaved=True), longest

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms of heads where config.json says so (Command R+)."""
        head_norm = cls.norm(config) if config.flag("use_qk_norm", False) else None
        return dataclasses.replace(super().attention(config, attention), head_norm=head_norm)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False


class Cohere2(Cohere):
    """Windows and rotation on three of four layers; the fourth has neither."""

    defaults: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """On layers with windows alone."""
        rope, longest = super().rope(config, head_size, window)
        return (None if window is None else rope), longest

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of all layers but the last of a period."""
        return read_windows(config, num_layers, config.integer("sliding_window_pattern", 1, 1 << 16, 4))
