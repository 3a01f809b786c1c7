"""Qwen2 and Qwen3: Llamas with biases on queries, keys and values, or with norms on every query and key head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.config.families.llama import Llama
from quire.config.hf_config import Heads, read_heads, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, NormArch


class Qwen2(Llama):
    """Biases on queries, keys and values; windows from a layer on, when switched on."""

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With biases on queries, keys and values."""
        return dataclasses.replace(attention, qkv_bias=True)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """`use_sliding_window` decides; which layers have windows, `layer_types` or else `max_window_layers`."""
        if not config.flag("use_sliding_window", False):
            return (None,) * num_layers
        default = None if "sliding_window" in config.raw else 4096
        window = config.optional_integer("sliding_window", 1, MAX_POSITIONS) or default
        layer_types = config.texts("layer_types")
        if layer_types:
            return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
        first = config.integer("max_window_layers", 0, 1 << 16, 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))


class Qwen3(Qwen2):
    """A norm on every query and key head, before they are rotated; biases if config.json says so."""

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Heads have 128 elements unless config.json says otherwise, as in transformers."""
        return read_heads(config, default_head_size=128)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms on heads."""
        has_bias = config.flag("attention_bias", False)
        return dataclasses.replace(
            attention, qkv_bias=has_bias, output_bias=has_bias, head_norm=NormArch(eps=read_norm_eps(config))
        )
