"""Qwen3-Next, Qwen3.5 and Qwen3.6: three Gated DeltaNet layers for each layer of gated attention, dense or mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.qwen import Qwen3
from quire.config.families.qwen_moe import read_qwen_moe, read_shared_expert, read_sparse_layers
from quire.config.hf_config import (
    Heads,
    check_divides,
    read_heads,
    read_layer_types,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import MLP_MIXTURE_NAMES, with_experts
from quire.config.model_arch import AttentionArch, GatedDeltaNetArch, ModelArch, NormArch

LINEAR, FULL = "linear_attention", "full_attention"
MAX_STATE_HEADS = 1024
MAX_STATE_SIZE = 1024


class Qwen3_5(Qwen3):
    """Dense. Gains of norms are stored as their difference from 1, except those after the gated delta rule.

    Text runs; the tensors that serve images and the extra layer that predicts further tokens are ignored. Its
    multi-section rotary embedding is the plain one for text, whose three positions are equal.
    """

    text_config = True
    prefixes: ClassVar[tuple[str, ...]] = ("model.", "model.language_model.")
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"(^|\.)mtp\.", r"(^|\.)visual\.")

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(with_defaults(raw, partial_rotary_factor=0.25))
        layer_types = read_hybrid_layers(config)
        arch = super().parse({**config.raw, "layer_types": None})
        norm = NormArch(eps=read_norm_eps(config), gain_offset=1.0)
        delta_net = read_delta_net(config)
        layers = [
            dataclasses.replace(
                layer,
                attention=layer.attention if kind == FULL else None,
                delta_net=delta_net if kind == LINEAR else None,
                mixer_norm=norm,
                ffn_norm=norm,
            )
            for layer, kind in zip(arch.layers, layer_types, strict=True)
        ]
        return dataclasses.replace(arch, layers=tuple(layers), head=dataclasses.replace(arch.head, norm=norm))

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Heads have 256 elements unless config.json says otherwise, as in transformers."""
        return read_heads(config, default_head_size=256)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms on heads and an output gate."""
        attention = super().attention(config, attention)
        norm = NormArch(eps=read_norm_eps(config), gain_offset=1.0)
        return dataclasses.replace(attention, head_norm=norm, has_output_gate=True)

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> tuple[None, ...]:
        """None."""
        return (None,) * num_layers


class Qwen3_5Moe(Qwen3_5):
    """A mixture with a gated shared expert in every layer."""

    tensor_names = MLP_MIXTURE_NAMES
    layouts: ClassVar[Mapping[str, str]] = {"moe.experts": "stacked"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(with_defaults(raw, norm_topk_prob=True, intermediate_size=5632))
        moe = read_shared_expert(config, read_qwen_moe(config))
        return with_experts(super().parse(config.raw), moe, read_sparse_layers(config))


class Qwen3Next(Qwen3_5Moe):
    """Text alone. What a key head of Gated DeltaNet is projected to lies together; some layers may be dense."""

    text_config = False
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    layouts: ClassVar[Mapping[str, str]] = {"linear_attn.in_proj": "by_group"}


def with_defaults(raw: Mapping[str, object], **defaults: object) -> dict[str, object]:
    """Fields of a config.json, and others where they are absent or null."""
    return {**raw, **{name: value for name, value in defaults.items() if raw.get(name) is None}}


def read_hybrid_layers(config: FieldReader) -> tuple[str, ...]:
    """The kind of each layer: `layer_types`, or every `full_attention_interval`-th with attention."""
    num_layers = read_num_layers(config)
    interval = config.integer("full_attention_interval", 1, 1 << 16, 4)
    default = tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers))
    return read_layer_types(config, num_layers, (LINEAR, FULL)) or default


def read_delta_net(config: FieldReader) -> GatedDeltaNetArch:
    """The Gated DeltaNet layers of the `linear_*` fields, with transformers' defaults.

    Raises:
        ModelError: heads that do not divide, or sizes that the kernels cannot take.
    """
    key_heads = config.integer("linear_num_key_heads", 1, MAX_STATE_HEADS, 16)
    value_heads = config.integer("linear_num_value_heads", 1, MAX_STATE_HEADS, 32)
    check_divides(config, "linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)
    value_size = config.integer("linear_value_head_dim", 1, MAX_STATE_SIZE, 128)
    if value_size % 16:
        raise config.error("linear_value_head_dim", f"is {value_size}", "it must be a multiple of 16")
    return GatedDeltaNetArch(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=config.integer("linear_key_head_dim", 1, MAX_STATE_SIZE, 128),
        value_size=value_size,
        conv_size=config.integer("linear_conv_kernel_dim", 2, 8, 4),
        norm=NormArch(eps=read_norm_eps(config)),
    )
