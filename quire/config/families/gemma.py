"""Gemma 1, 2 and 3: scaled embeddings, gains stored as differences from one, GELUs; later norms on outputs, too.

Source: Gemma Team 2024 (Gemma), 2024 (Gemma 2), 2025 (Gemma 3), each section 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import (
    read_activation,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_windows,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope, parse_rope_of_windows
from quire.config.model_arch import AttentionArch, EmbeddingArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import LLAMA_NAMES, TensorNames


class Gemma(Llama):
    """Heads are larger than hidden_size / num_attention_heads; embeddings are scaled by the root of the hidden size."""

    defaults: ClassVar[Mapping[str, object]] = {"head_dim": 256}
    is_tied = True

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        if raw.get("use_bidirectional_attention"):
            raise FieldReader(raw).error(
                "use_bidirectional_attention", "is set", "encoders are not supported; use a causal model"
            )
        arch = super().parse(raw)
        return dataclasses.replace(arch, embedding=EmbeddingArch(scale=arch.hidden_size**0.5))

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """Checkpoints store gains less one."""
        return NormArch(eps=read_norm_eps(config), gain_offset=1.0)

    @classmethod
    def mlp(cls, config: FieldReader) -> MLPArch:
        """The first checkpoints say "gelu" and mean the approximation by a hyperbolic tangent."""
        read_activation(config, "hidden_act", "gelu_pytorch_tanh", ("gelu", "gelu_pytorch_tanh"))
        return MLPArch(intermediate_size=read_intermediate_size(config), activation="gelu_tanh")


class Gemma2(Gemma):
    """Norms on inputs and outputs, soft caps on scores and logits, windows on every other layer."""

    tensor_names: ClassVar[TensorNames] = (
        (r"\.mixer_post_norm\.", ".post_attention_layernorm."),
        (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
        (r"\.ffn_post_norm\.", ".post_feedforward_layernorm."),
        LLAMA_NAMES[0],
    )
    window_period = 2

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        arch = super().parse(raw)
        norm = arch.head.norm
        cap = cls.soft_cap(FieldReader(raw), "final_logit_softcapping")
        arch = with_layers(arch, lambda _, layer: dataclasses.replace(layer, mixer_post_norm=norm, ffn_post_norm=norm))
        return dataclasses.replace(arch, head=dataclasses.replace(arch.head, soft_cap=cap))

    @classmethod
    def mlp(cls, config: FieldReader) -> MLPArch:
        """As Gemma's, from a field of another name."""
        activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
        return MLPArch(intermediate_size=read_intermediate_size(config), activation=activation)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Scaled as if heads had `query_pre_attn_scalar` elements."""
        scale = config.number("query_pre_attn_scalar", 1.0, 1e6, 256.0) ** -0.5
        cap = cls.soft_cap(config, "attn_logit_softcapping")
        return dataclasses.replace(super().attention(config, attention), scale=scale, soft_cap=cap)

    @classmethod
    def soft_cap(cls, config: FieldReader, name: str) -> float:
        """A cap of scores or logits; 0 = none, which an explicit null means."""
        defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return config.number(name, 0.0, 1e6, 0.0 if name in config.raw else defaults[name])

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of all layers but the last of a period."""
        return read_windows(config, num_layers, config.integer("sliding_window_pattern", 1, 1 << 16, cls.window_period))


class Gemma3(Gemma2):
    """Norms on heads, windows on five of six layers, which have a rotary embedding of their own."""

    # Those of the language model within Gemma3ForConditionalGeneration: files leave out what equals them.
    defaults: ClassVar[Mapping[str, object]] = {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
        "max_position_embeddings": 131072, "rope_theta": 1e6,
    }  # fmt: skip
    window_period = 6

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """As Gemma 2 without a cap."""
        capped = super().attention(config, attention)
        return dataclasses.replace(capped, soft_cap=0.0, head_norm=cls.norm(config))

    @classmethod
    def soft_cap(cls, config: FieldReader, name: str) -> float:
        """None but what config.json names."""
        return config.number(name, 0.0, 1e6, 0.0)

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """`max_position_embeddings` has the scaling in it already."""
        longest = read_max_positions(config)
        if window is not None:
            theta = config.number("rope_local_base_freq", 2.0, 1e15, 10000.0)
            return parse_rope_of_windows(config, head_size, longest, theta)[0], longest
        return parse_rope(config, head_size, longest, kind="full_attention")[0], longest


class Gemma3Conditional(Gemma3):
    """The language model of a Gemma 3 that takes images."""

    text_config = True
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    ignored_tensors = (r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.")
