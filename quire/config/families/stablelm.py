"""StableLM: a Llama with LayerNorms, which rotates a quarter of each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama, with_layers
from quire.config.hf_config import read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import AttentionArch, ModelArch, NormArch
from quire.config.model_family import LLAMA_NAMES


class StableLM(Llama):
    """Source: Bellagente et al. 2024 (Stable LM 2 1.6B), section 2.2."""

    tensor_names = (
        *LLAMA_NAMES,
        (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
    )
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.head_norms": "by_head"}
    defaults: ClassVar[Mapping[str, object]] = {"partial_rotary_factor": 0.25}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        arch = super().parse(raw)
        if not config.flag("use_parallel_residual", False):
            return arch
        return with_layers(arch, lambda _, layer: dataclasses.replace(layer, is_parallel=True, ffn_norm=None))

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """With a bias."""
        return NormArch(eps=read_norm_eps(config, "layer_norm_eps", 1e-5), is_centered=True, has_bias=True)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With biases on queries, keys and values, and norms of heads (StableLM 2 12B), if config.json says so."""
        head_norm = None
        if config.flag("qk_layernorm", False):
            head_norm = dataclasses.replace(cls.norm(config), has_bias=False)
        return dataclasses.replace(attention, qkv_bias=config.flag("use_qkv_bias", False), head_norm=head_norm)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False
