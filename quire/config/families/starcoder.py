"""StarCoder2: LayerNorms, biases everywhere, MLPs without gates, one window for all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.config.families.llama import Llama
from quire.config.hf_config import read_activation, read_intermediate_size, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, MLPArch, NormArch
from quire.config.model_family import LLAMA_NAMES


class Starcoder2(Llama):
    """Source: Lozhkov et al. 2024 (StarCoder 2 and The Stack v2), section 5.2."""

    tensor_names = (*LLAMA_NAMES, (r"\.mlp\.up_proj\.", ".mlp.c_fc."), (r"\.mlp\.down_proj\.", ".mlp.c_proj."))
    is_tied = True

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """With a bias."""
        return NormArch(eps=read_norm_eps(config, "norm_epsilon", 1e-5), is_centered=True, has_bias=True)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With biases, unless config.json says otherwise."""
        has_bias = config.flag("use_bias", True)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def mlp(cls, config: FieldReader) -> MLPArch:
        """Without gates."""
        activation = read_activation(
            config, "hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu_new", "gelu")
        )
        return MLPArch(
            intermediate_size=read_intermediate_size(config), activation=activation, is_gated=False,
            has_bias=config.flag("use_bias", True),
        )  # fmt: skip

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """One for all layers, if any."""
        return (config.optional_integer("sliding_window", 1, MAX_POSITIONS),) * num_layers
