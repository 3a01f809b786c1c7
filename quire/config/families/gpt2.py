"""GPT-2 and GPT-J: LayerNorms, MLPs without gates, and positions from a table or by rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.hf_config import (
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
    divided_head_size,
    make_arch,
    read_activation,
    read_hidden_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig
from quire.config.model_arch import AttentionArch, EmbeddingArch, HeadArch, LayerArch, MLPArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily

ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu")


def read_mlp(config: FieldReader) -> MLPArch:
    """The feed-forward network of both, four times as wide unless config.json says otherwise."""
    size = config.optional_integer("n_inner", 1, MAX_INTERMEDIATE_SIZE) or 4 * read_hidden_size(config, "n_embd")
    activation = read_activation(config, "activation_function", "gelu_new", ACTIVATIONS)
    return MLPArch(intermediate_size=size, activation=activation, is_gated=False, has_bias=True)


def read_norm(config: FieldReader) -> NormArch:
    """A LayerNorm with a bias."""
    return NormArch(eps=read_norm_eps(config, "layer_norm_epsilon", 1e-5), is_centered=True, has_bias=True)


class GPT2(ModelFamily):
    """Source: Radford et al. 2019 (Language Models are Unsupervised Multitask Learners), section 2.3."""

    tensor_names = (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.embed_positions\.", "transformer.wpe."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.mixer_norm\.", ".ln_1."),
        (r"\.ffn_norm\.", ".ln_2."),
        (r"\.self_attn\.qkv_proj\.", ".attn.c_attn."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.mlp\.up_proj\.", ".mlp.c_fc."),
        (r"\.mlp\.down_proj\.", ".mlp.c_proj."),
    )
    prefixes = ("transformer.", "")
    layouts: ClassVar[Mapping[str, str]] = {
        "self_attn.qkv_proj": "concatenated, transposed", "self_attn.o_proj": "shards, transposed",
        "mlp.down_proj": "shards, transposed",
    }  # fmt: skip
    ignored_tensors = (r"\.attn\.(masked_)?bias$",)

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        hidden_size, num_layers = read_hidden_size(config, "n_embd"), read_num_layers(config, "n_layer")
        num_heads = config.integer("n_head", 1, MAX_HEADS)
        head_size = divided_head_size(config, hidden_size, num_heads, "n_embd", "n_head")
        max_positions = read_max_positions(config, "n_positions")
        scale = head_size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
        by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
        norm, mlp = read_norm(config), read_mlp(config)
        layers = [
            LayerArch(
                attention=AttentionArch(
                    num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, qkv_bias=True, output_bias=True,
                    scale=scale / (layer + 1) if by_layer else scale,
                ),
                mlp=mlp, mixer_norm=norm, ffn_norm=norm,
            )
            for layer in range(num_layers)
        ]  # fmt: skip
        embedding = EmbeddingArch(num_positions=max_positions)
        return make_arch(
            config, layers, max_positions, head=HeadArch(norm=norm), embedding=embedding, is_tied=True,
            hidden_name="n_embd",
        )  # fmt: skip


class GPTJ(ModelFamily):
    """Attention and MLP side by side behind one norm. Source: Wang and Komatsuzaki 2021 (GPT-J-6B)."""

    tensor_names = (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.mixer_norm\.", ".ln_1."),
        (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.up_proj\.", ".mlp.fc_in."),
        (r"\.mlp\.down_proj\.", ".mlp.fc_out."),
    )
    ignored_tensors = (r"\.attn\.(masked_)?bias$", r"\.attn\.embed_positions$")

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        hidden_size = read_hidden_size(config, "n_embd")
        num_heads = config.integer("n_head", 1, MAX_HEADS)
        head_size = divided_head_size(config, hidden_size, num_heads, "n_embd", "n_head")
        rotary_dim = config.integer("rotary_dim", 2, head_size, min(64, head_size))
        if rotary_dim % 2:
            raise config.error("rotary_dim", f"is {rotary_dim}", "it must be even: elements are rotated in pairs")
        norm = read_norm(config)
        layer = LayerArch(
            attention=AttentionArch(
                num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, scale=head_size**-0.5,
                rope=RopeConfig(rotary_dim=rotary_dim, is_interleaved=True),
            ),
            mlp=read_mlp(config), mixer_norm=norm, is_parallel=True,
        )  # fmt: skip
        return make_arch(
            config, [layer] * read_num_layers(config, "n_layer"), read_max_positions(config, "n_positions"),
            head=HeadArch(norm=norm, has_bias=True), hidden_name="n_embd",
        )  # fmt: skip
