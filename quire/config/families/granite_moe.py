"""Granite-MoE: a Llama whose scales are fields of config.json, with mixtures in the place of MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import read_intermediate_size
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import read_num_chosen, read_num_experts, with_experts
from quire.config.model_arch import AttentionArch, EmbeddingArch, ModelArch, MoEArch, RouterArch
from quire.config.model_family import LLAMA_NAMES

MAX_SCALE = 1e6


class GraniteMoe(Llama):
    """Source: IBM Granite Team 2024 (Granite 3.0 Language Models), section 2."""

    tensor_names = (
        *LLAMA_NAMES,
        (r"\.moe\.router\.", ".block_sparse_moe.router.layer."),
        (r"\.moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
        (r"\.moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
    )
    layouts: ClassVar[Mapping[str, str]] = {"moe.experts": "stacked"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        num_experts = read_num_experts(config)
        moe = MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=read_intermediate_size(config),
            router=RouterArch(scoring="softmax_of_chosen", is_normalized=False),
        )
        arch = with_experts(super().parse(raw), moe)
        residual_scale = config.number("residual_multiplier", 0.0, MAX_SCALE, 1.0)
        layers = tuple(dataclasses.replace(layer, residual_scale=residual_scale) for layer in arch.layers)
        head = dataclasses.replace(arch.head, scale=1.0 / config.number("logits_scaling", 1e-6, MAX_SCALE, 1.0))
        embedding = EmbeddingArch(scale=config.number("embedding_multiplier", 0.0, MAX_SCALE, 1.0))
        return dataclasses.replace(arch, layers=layers, head=head, embedding=embedding)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """The scale of scores is a field."""
        scale = config.number("attention_multiplier", 0.0, MAX_SCALE, 1.0)
        return dataclasses.replace(super().attention(config, attention), scale=scale)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False
