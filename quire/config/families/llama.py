"""Llama 1, 2 and 3, and what is computed as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
    refuse_quantized,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily


class Llama(ModelFamily):
    """Grouped-query attention with rotary positions, gated MLPs, RMSNorms. Families like it derive from this."""

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        refuse_quantized(config)
        heads = cls.heads(config)
        rope, longest = parse_rope(config, heads.head_size, read_max_positions(config))
        norm = NormArch(eps=read_norm_eps(config))
        attention = cls.attention(
            config,
            AttentionArch(
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_size=heads.head_size,
                scale=heads.head_size**-0.5,
                rope=rope,
            ),
        )
        mlp = MLPArch(
            intermediate_size=read_intermediate_size(config),
            activation=read_activation(config),
            has_bias=cls.mlp_bias(config),
        )
        windows = cls.windows(config, read_num_layers(config))
        check_windows(config, windows)
        layers = [
            LayerArch(attention=dataclasses.replace(attention, window=window), mlp=mlp, mixer_norm=norm, ffn_norm=norm)
            for window in windows
        ]
        return make_arch(config, layers, longest, head=HeadArch(norm=norm))

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Numbers and size of the heads."""
        return read_heads(config)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """The attention of all layers; `attention` has the heads and the rotary embedding."""
        has_bias = config.flag("attention_bias", False)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """Whether MLPs have biases."""
        return config.flag("mlp_bias", False)

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Per layer: tokens a query sees, itself included; None = all."""
        return (None,) * num_layers
