"""Mistral: a Llama without biases, with one window for all layers; Ministral, Ministral 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import read_windows
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, AttentionTemperature, ModelArch


class Mistral(Llama):
    """Source: Jiang et al. 2023 (Mistral 7B), section 2."""

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without biases, whatever config.json says."""
        return attention

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """An absent field means 4096 to transformers; an explicit null means no window."""
        default = None if "sliding_window" in config.raw else 4096
        window = config.optional_integer("sliding_window", 1, MAX_POSITIONS)
        return (window if window is not None else default,) * num_layers


class Ministral(Mistral):
    """Windows on the layers that `layer_types` names."""

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of all layers, or of those that `layer_types` names."""
        return read_windows(config, num_layers, num_layers + 1)


class Ministral3(Mistral):
    """Queries grow with the logarithm of their position past the original length. Source: as released (2025)."""

    defaults: ClassVar[Mapping[str, object]] = {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }  # fmt: skip

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With a temperature."""
        rope = config.optional_object("rope_parameters") or FieldReader({})
        coefficient = rope.optional_number("llama_4_scaling_beta", 0.0, 1e3)
        if not coefficient:
            return attention
        original = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
        temperature = AttentionTemperature(coefficient=coefficient, period=original)
        return dataclasses.replace(attention, temperature=temperature)


class Mistral3(Ministral3):
    """The language model of a Mistral that takes images: a Mistral, or a Ministral 3."""

    text_config = True
    prefixes = ("", "language_model.")
    ignored_tensors = (r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.")

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        text: type[Mistral] = Ministral3 if raw.get("model_type") == "ministral3" else Mistral
        return text.parse(raw)
