"""OPT: a table of positions whose first two rows are not used; the 350M model has its norms last."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.hf_config import (
    MAX_HIDDEN_SIZE,
    make_arch,
    read_activation,
    read_heads,
    read_hidden_size,
    read_intermediate_size,
    read_max_positions,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import AttentionArch, EmbeddingArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily


class OPT(ModelFamily):
    """Source: Zhang et al. 2022 (OPT), section 2.1, and the 350M model as released."""

    tensor_names = (
        (r"^model\.norm\.", "model.decoder.final_layer_norm."),
        (r"^model\.(?!decoder)", "model.decoder."),
        (r"\.mixer_norm\.", ".self_attn_layer_norm."),
        (r"\.ffn_norm\.", ".final_layer_norm."),
        (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
        (r"\.mlp\.up_proj\.", ".fc1."),
        (r"\.mlp\.down_proj\.", ".fc2."),
    )
    prefixes = ("model.", "")

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        is_post_norm = not config.flag("do_layer_norm_before", True)
        hidden_size = read_hidden_size(config)
        table_size = config.integer("word_embed_proj_dim", 1, MAX_HIDDEN_SIZE, hidden_size)
        heads, has_bias = read_heads(config), config.flag("enable_bias", True)
        is_affine = config.flag("layer_norm_elementwise_affine", True)
        norm = NormArch(eps=1e-5, is_centered=True, has_bias=is_affine, has_gain=is_affine)
        layer = LayerArch(
            attention=AttentionArch(
                num_heads=heads.num_heads, num_kv_heads=heads.num_heads, head_size=heads.head_size,
                scale=heads.head_size**-0.5, qkv_bias=has_bias, output_bias=has_bias,
            ),
            mlp=MLPArch(
                intermediate_size=read_intermediate_size(config, "ffn_dim"), is_gated=False, has_bias=has_bias,
                activation=read_activation(config, "activation_function", "relu", ("relu", "gelu", "gelu_new")),
            ),
            mixer_norm=norm, ffn_norm=norm, is_post_norm=is_post_norm,
        )  # fmt: skip
        max_positions = read_max_positions(config)
        last = None if is_post_norm or config.flag("_remove_final_layer_norm", False) else norm
        embedding = EmbeddingArch(
            num_positions=max_positions, position_offset=2, table_size=0 if table_size == hidden_size else table_size
        )
        return make_arch(
            config, [layer] * read_num_layers(config), max_positions, head=HeadArch(norm=last),
            embedding=embedding, is_tied=True,
        )  # fmt: skip
