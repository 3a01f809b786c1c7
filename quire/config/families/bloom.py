"""BLOOM and MPT: positions as slopes on attention scores (ALiBi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.alibi import alibi_slopes
from quire.config.hf_config import (
    MAX_HEADS,
    divided_head_size,
    make_arch,
    read_hidden_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, EmbeddingArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily


class Bloom(ModelFamily):
    """Source: BigScience 2022 (BLOOM), section 3.2. Sequences may have 2048 tokens, or `seq_length`."""

    tensor_names = (
        (r"^model\.embed_tokens\.", "transformer.word_embeddings."),
        (r"^model\.embedding_norm\.", "transformer.word_embeddings_layernorm."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.mixer_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.qkv_proj\.", ".self_attention.query_key_value."),
        (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
        (r"\.mlp\.up_proj\.", ".mlp.dense_h_to_4h."),
        (r"\.mlp\.down_proj\.", ".mlp.dense_4h_to_h."),
    )
    prefixes = ("transformer.", "")
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "by_head"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        # Its first configurations call two sizes otherwise.
        older = {"hidden_size": raw.get("n_embed"), "n_head": raw.get("num_attention_heads")}
        config = FieldReader({**{name: value for name, value in older.items() if value is not None}, **raw})
        if config.flag("apply_residual_connection_post_layernorm", False):
            raise config.error(
                "apply_residual_connection_post_layernorm", "is true", "only models that add the layer's input run"
            )
        hidden_size = read_hidden_size(config)
        num_heads = config.integer("n_head", 1, MAX_HEADS)
        head_size = divided_head_size(config, hidden_size, num_heads, "hidden_size", "n_head")
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5), is_centered=True, has_bias=True)
        layer = LayerArch(
            attention=AttentionArch(
                num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, scale=head_size**-0.5,
                alibi_slopes=alibi_slopes(num_heads), qkv_bias=True, output_bias=True,
            ),
            mlp=MLPArch(intermediate_size=4 * hidden_size, activation="gelu_tanh", is_gated=False, has_bias=True),
            mixer_norm=norm, ffn_norm=norm,
        )  # fmt: skip
        longest = config.integer("seq_length", 1, MAX_POSITIONS, 2048)
        return make_arch(
            config, [layer] * read_num_layers(config, "n_layer"), longest, head=HeadArch(norm=norm),
            embedding=EmbeddingArch(norm=norm), is_tied=True,
        )  # fmt: skip


class MPT(ModelFamily):
    """Source: MosaicML NLP Team 2023 (MPT-7B, MPT-30B)."""

    tensor_names = (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.norm_f."),
        (r"^model\.layers\.", "transformer.blocks."),
        (r"\.mixer_norm\.", ".norm_1."),
        (r"\.ffn_norm\.", ".norm_2."),
        (r"\.self_attn\.qkv_proj\.", ".attn.Wqkv."),
        (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
        (r"\.mlp\.", ".ffn."),
    )
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "concatenated"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        attention = config.optional_object("attn_config") or FieldReader({}, config.source)
        _refuse_variants(config, attention)
        hidden_size, num_heads = read_hidden_size(config, "d_model"), config.integer("n_heads", 1, MAX_HEADS)
        head_size = divided_head_size(config, hidden_size, num_heads, "d_model", "n_heads")
        norm = NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5), is_centered=True)
        slopes = alibi_slopes(num_heads, attention.number("alibi_bias_max", 1.0, 64.0, 8.0))
        layer = LayerArch(
            attention=AttentionArch(
                num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, alibi_slopes=slopes,
                scale=attention.number("softmax_scale", 1e-9, 1e9, head_size**-0.5),
                clip=attention.number("clip_qkv", 0.0, 1e9, 0.0),
            ),
            mlp=MLPArch(
                intermediate_size=config.integer("expansion_ratio", 1, 64, 4) * hidden_size, activation="gelu",
                is_gated=False,
            ),
            mixer_norm=norm, ffn_norm=norm,
        )  # fmt: skip
        return make_arch(
            config, [layer] * read_num_layers(config, "n_layers"), read_max_positions(config, "max_seq_len"),
            head=HeadArch(norm=norm), is_tied=True, hidden_name="d_model",
        )  # fmt: skip


def _refuse_variants(config: FieldReader, attention: FieldReader) -> None:
    """Name what transformers does not compute either."""
    attention.text("attn_type", ("multihead_attention",), "multihead_attention")
    unsupported = {"qk_ln": attention.flag("qk_ln", False), "prefix_lm": attention.flag("prefix_lm", False)}
    unsupported["alibi"] = not attention.flag("alibi", True)
    for name, is_set in unsupported.items():
        if is_set:
            raise attention.error(name, f"is {str(attention.raw.get(name)).lower()}", "only models without run")
    if not config.flag("no_bias", True):
        raise config.error("no_bias", "is false", "only models without biases run")
