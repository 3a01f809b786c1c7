"""Falcon 7B, 40B, 180B and RW: fused queries, keys and values by group, and several forms of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.alibi import alibi_slopes
from quire.config.hf_config import (
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
    check_divides,
    divided_head_size,
    make_arch,
    read_activation,
    read_hidden_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily, TensorNames

NAMES: TensorNames = (
    (r"^model\.embed_tokens\.", "transformer.word_embeddings."),
    (r"^model\.norm\.", "transformer.ln_f."),
    (r"^model\.layers\.", "transformer.h."),
    (r"\.self_attn\.qkv_proj\.", ".self_attention.query_key_value."),
    (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
    (r"\.mlp\.up_proj\.", ".mlp.dense_h_to_4h."),
    (r"\.mlp\.down_proj\.", ".mlp.dense_4h_to_h."),
)
ONE_NORM: TensorNames = ((r"\.mixer_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."))
TWO_NORMS: TensorNames = ((r"\.mixer_norm\.", ".ln_attn."), (r"\.ffn_norm\.", ".ln_mlp."))


class Falcon(ModelFamily):
    """Source: Almazrouei et al. 2023 (The Falcon Series of Open Language Models), section 4."""

    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "by_group"}

    @classmethod
    def names(cls, arch: ModelArch) -> TensorNames:
        """Norms side by side have names of their own."""
        layer = arch.layers[0]
        return NAMES + (TWO_NORMS if layer.is_parallel and layer.ffn_norm is not None else ONE_NORM)

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        is_new = config.flag("new_decoder_architecture", False)
        is_parallel = is_new or config.flag("parallel_attn", True)
        has_two = is_new and config.integer("num_ln_in_parallel_attn", 1, 2, 2) == 2
        hidden_size, has_bias = read_hidden_size(config), config.flag("bias", False)
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5), is_centered=True, has_bias=True)
        attention, longest = _attention(config, hidden_size, is_new=is_new, has_bias=has_bias)
        size = config.optional_integer("ffn_hidden_size", 1, MAX_INTERMEDIATE_SIZE) or 4 * hidden_size
        activation = read_activation(config, "activation", "gelu", ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
        layer = LayerArch(
            attention=attention,
            mlp=MLPArch(intermediate_size=size, activation=activation, is_gated=False, has_bias=has_bias),
            mixer_norm=norm,
            ffn_norm=norm if has_two or not is_parallel else None,
            is_parallel=is_parallel,
        )
        return make_arch(config, [layer] * read_num_layers(config), longest, head=HeadArch(norm=norm), is_tied=True)


def _attention(config: FieldReader, hidden_size: int, *, is_new: bool, has_bias: bool) -> tuple[AttentionArch, int]:
    """The attention of all layers, and the longest sequence."""
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    if is_new:
        num_kv_heads = config.integer("num_kv_heads", 1, MAX_HEADS, num_heads)
        check_divides(config, "num_kv_heads", num_kv_heads, "num_attention_heads", num_heads)
    else:
        num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    head_size = divided_head_size(config, hidden_size, num_heads)
    rope, longest = parse_rope(config, head_size, read_max_positions_or(config, 2048))
    has_slopes = config.flag("alibi", False)
    # Added to the scores before these are scaled.
    slopes = tuple(slope * head_size**-0.5 for slope in alibi_slopes(num_heads))
    attention = AttentionArch(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5,
        rope=None if has_slopes else rope,
        alibi_slopes=slopes if has_slopes else None, qkv_bias=has_bias, output_bias=has_bias,
    )  # fmt: skip
    return attention, longest


def read_max_positions_or(config: FieldReader, default: int) -> int:
    """Longest sequence; the first Falcons do not name it."""
    return read_max_positions(config) if config.has("max_position_embeddings") else default
