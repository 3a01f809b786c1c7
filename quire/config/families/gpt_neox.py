"""GPT-NeoX and Pythia: attention and MLP side by side, each behind a norm of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.hf_config import (
    make_arch,
    read_activation,
    read_heads,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu")


class GPTNeoX(ModelFamily):
    """Source: Black et al. 2022 (GPT-NeoX-20B), section 3.1."""

    tensor_names = (
        (r"^model\.embed_tokens\.", "gpt_neox.embed_in."),
        (r"^model\.norm\.", "gpt_neox.final_layer_norm."),
        (r"^model\.layers\.", "gpt_neox.layers."),
        (r"\.mixer_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.qkv_proj\.", ".attention.query_key_value."),
        (r"\.self_attn\.o_proj\.", ".attention.dense."),
        (r"\.mlp\.up_proj\.", ".mlp.dense_h_to_4h."),
        (r"\.mlp\.down_proj\.", ".mlp.dense_4h_to_h."),
        (r"^lm_head\.", "embed_out."),
    )
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "by_head"}
    ignored_tensors = (r"\.attention\.(masked_)?bias$",)

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        share = raw.get("rotary_pct")
        config = FieldReader({**raw, "partial_rotary_factor": 0.25 if share is None else share})
        heads = read_heads(config)
        rope, longest = parse_rope(config, heads.head_size, read_max_positions(config))
        has_bias = config.flag("attention_bias", True)
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_eps", 1e-5), is_centered=True, has_bias=True)
        layer = LayerArch(
            attention=AttentionArch(
                num_heads=heads.num_heads, num_kv_heads=heads.num_heads, head_size=heads.head_size,
                scale=heads.head_size**-0.5, rope=rope, qkv_bias=has_bias, output_bias=has_bias,
            ),
            mlp=MLPArch(
                intermediate_size=read_intermediate_size(config),
                activation=read_activation(config, "hidden_act", "gelu", ACTIVATIONS),
                is_gated=False, has_bias=True,
            ),
            mixer_norm=norm, ffn_norm=norm, is_parallel=config.flag("use_parallel_residual", True),
        )  # fmt: skip
        return make_arch(config, [layer] * read_num_layers(config), longest, head=HeadArch(norm=norm))
