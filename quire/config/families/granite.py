"""Granite 3: a Llama with factors on embeddings, scores, outputs and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import AttentionArch, EmbeddingArch, ModelArch


class Granite(Llama):
    """Source: IBM 2024 (Granite 3.0 Language Models), section 3."""

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        factor = config.number("residual_multiplier", 1e-6, 1e6, 1.0)
        arch = with_layers(super().parse(raw), lambda _, layer: dataclasses.replace(layer, residual_scale=factor))
        return dataclasses.replace(
            arch,
            embedding=EmbeddingArch(scale=config.number("embedding_multiplier", 1e-6, 1e6, 1.0)),
            head=dataclasses.replace(arch.head, scale=1.0 / config.number("logits_scaling", 1e-6, 1e6, 1.0)),
        )

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With the factor on scores that config.json names."""
        scale = config.number("attention_multiplier", 1e-6, 1e6, 1.0)
        return dataclasses.replace(super().attention(config, attention), scale=scale)
