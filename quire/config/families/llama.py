"""Llama 1, 2 and 3, and what is computed as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from quire.config.hf_config import (
    Heads,
    check_windows,
    make_arch,
    read_activation,
    read_heads,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily


class Llama(ModelFamily):
    """Grouped-query attention with rotary positions, gated MLPs, RMSNorms. Families like it derive from this.

    Attributes:
        defaults: what absent fields mean where Llama requires them or has another default.
        is_tied: what an absent `tie_word_embeddings` means.
    """

    defaults: ClassVar[Mapping[str, object]] = {}
    is_tied: ClassVar[bool] = False

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader({**cls.defaults, **raw})
        heads = cls.heads(config)
        norm, mlp = cls.norm(config), cls.mlp(config)
        windows = cls.windows(config, read_num_layers(config))
        check_windows(config, windows)
        layer_of: dict[int | None, LayerArch] = {}
        longest = 0
        for window in dict.fromkeys(windows):
            rope, longest_of_rope = cls.rope(config, heads.head_size, window)
            longest = max(longest, longest_of_rope)
            attention = AttentionArch(
                num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size,
                scale=heads.head_size**-0.5, rope=rope, window=window,
            )  # fmt: skip
            layer_of[window] = LayerArch(
                attention=cls.attention(config, attention), mlp=mlp, mixer_norm=norm, ffn_norm=norm
            )
        layers = [layer_of[window] for window in windows]
        return make_arch(config, layers, longest, head=HeadArch(norm=norm), is_tied=cls.is_tied)

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Numbers and size of the heads."""
        return read_heads(config)

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """Before attention, before the MLP, and after the last layer."""
        return NormArch(eps=read_norm_eps(config))

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """The rotary embedding of layers with this window, and the longest sequence it serves."""
        return parse_rope(config, head_size, read_max_positions(config))

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """The attention of layers with the same window; `attention` has that, the heads and the rotary embedding."""
        has_bias = config.flag("attention_bias", False)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def mlp(cls, config: FieldReader) -> MLPArch:
        """The MLP of all layers."""
        return MLPArch(
            intermediate_size=read_intermediate_size(config),
            activation=read_activation(config),
            has_bias=cls.mlp_bias(config),
        )

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """Whether MLPs have biases."""
        return config.flag("mlp_bias", False)

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Per layer: tokens a query sees, itself included; None = all."""
        return (None,) * num_layers


class SeedOss(Llama):
    """Biases on queries, keys and values, and on outputs if config.json says so. Source: ByteDance Seed 2025."""

    defaults: ClassVar[Mapping[str, object]] = {"head_dim": 128}

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Two flags instead of one."""
        return dataclasses.replace(
            attention,
            qkv_bias=config.flag("attention_bias", True),
            output_bias=config.flag("attention_out_bias", False),
        )


def with_layers(arch: ModelArch, change: Callable[[int, LayerArch], LayerArch]) -> ModelArch:
    """The model with changed layers: `change` takes a layer's number and the layer."""
    return dataclasses.replace(arch, layers=tuple(change(*numbered) for numbered in enumerate(arch.layers)))
