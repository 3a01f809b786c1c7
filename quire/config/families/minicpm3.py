"""MiniCPM3: dense layers with latent attention, and factors on embeddings, residual branches and logits.

Source: Hu et al. 2024 (MiniCPM), section 3 (the factors); DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 (latents).
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.hf_config import (
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    divided_head_size,
    make_arch,
    read_activation,
    read_hidden_size,
    read_intermediate_size,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_latent import read_latent_attention
from quire.config.model_arch import EmbeddingArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily


class MiniCPM3(ModelFamily):
    """Pairs of rotated elements are half a head apart, as in a Llama."""

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        hidden_size, num_layers = read_hidden_size(config), read_num_layers(config)
        value_size = None
        if config.optional_integer("v_head_dim", 1, MAX_HIDDEN_SIZE) is None:
            value_size = divided_head_size(config, hidden_size, config.integer("num_attention_heads", 1, MAX_HEADS))
        attention, longest = read_latent_attention(config, is_interleaved=False, value_size=value_size)
        norm = NormArch(eps=read_norm_eps(config, default=1e-5))
        depth = config.optional_number("scale_depth", 0.0, 1e4) if "scale_depth" in config.raw else 1.4
        base = config.optional_integer("dim_model_base", 1, MAX_HIDDEN_SIZE) if "dim_model_base" in config.raw else 256
        layer = LayerArch(
            latent_attention=attention,
            mlp=MLPArch(
                intermediate_size=read_intermediate_size(config),
                activation=read_activation(config),
                has_bias=config.flag("mlp_bias", False),
            ),
            mixer_norm=norm,
            ffn_norm=norm,
            residual_scale=1.0 if depth is None else depth / num_layers**0.5,
        )
        return make_arch(
            config,
            [layer] * num_layers,
            longest,
            head=HeadArch(norm=norm, scale=1.0 if base is None else base / hidden_size),
            embedding=EmbeddingArch(scale=config.number("scale_emb", 0.0, 1e6, 12.0)),
            is_tied=True,
        )
