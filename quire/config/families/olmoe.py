"""OLMoE: a Llama with norms over all query heads and all key heads, and mixtures in the place of MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.config.families.llama import Llama
from quire.config.hf_config import read_intermediate_size, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import MLP_MIXTURE_NAMES, read_num_chosen, read_num_experts, with_experts
from quire.config.model_arch import AttentionArch, ModelArch, MoEArch, NormArch, RouterArch


class Olmoe(Llama):
    """Source: Muennighoff et al. 2024 (OLMoE), section 2."""

    tensor_names = MLP_MIXTURE_NAMES

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        num_experts = read_num_experts(config)
        moe = MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=read_intermediate_size(config),
            router=RouterArch(is_normalized=config.flag("norm_topk_prob", False)),
        )
        return with_experts(super().parse({"rms_norm_eps": 1e-5, **raw}), moe)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With norms over all heads, and limits where config.json has some."""
        return dataclasses.replace(
            super().attention(config, attention),
            head_norm=NormArch(eps=read_norm_eps(config, default=1e-5)),
            has_row_norm=True,
            clip=config.number("clip_qkv", 0.0, 1e9, 0.0),
        )

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False
