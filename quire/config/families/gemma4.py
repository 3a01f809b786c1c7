"""Gemma 4: two kinds of layers with heads of different size, shared caches, and inputs of their own for layers.

In the mixture (26B-A4B) experts and a dense MLP are beside each other, and each has norms of its own.

Source: Google 2026 (Gemma 4), as released.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.config.families.gemma import Gemma2
from quire.config.hf_config import (
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    check_divides,
    make_arch,
    read_heads,
    read_hidden_size,
    read_intermediate_size,
    read_max_positions,
    read_norm_eps,
    read_num_layers,
    read_windows,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import MAX_CHOSEN, read_num_experts
from quire.config.hf_rope import parse_rope
from quire.config.model_arch import (
    AttentionArch,
    EmbeddingArch,
    HeadArch,
    LayerArch,
    ModelArch,
    MoEArch,
    NormArch,
    RouterArch,
)

ROPE: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


class Gemma4(Gemma2):
    """Gains are stored as they are; scores are not scaled, as queries and keys are normed."""

    tensor_names = (
        (r"\.mlp\.output_norm\.", ".post_feedforward_layernorm_1."),
        (r"\.moe\.input_norm\.", ".pre_feedforward_layernorm_2."),
        (r"\.moe\.output_norm\.", ".post_feedforward_layernorm_2."),
        (r"\.moe\.router\.norm\.weight$", ".router.scale"),
        (r"\.moe\.router\.expert_scales$", ".router.per_expert_scale"),
        (r"\.moe\.router\.", ".router.proj."),
        (r"\.moe\.experts\.", ".experts."),
        *Gemma2.tensor_names,
    )
    layouts: ClassVar[Mapping[str, str]] = {"moe.experts": "stacked"}
    # Of layers that read another one's cache; some files have them nevertheless.
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"\.self_attn\.[kv]_(proj|norm)\.",)

    defaults: ClassVar[Mapping[str, object]] = {
        "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262144, "max_position_embeddings": 131072, "rope_parameters": ROPE, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    }  # fmt: skip

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader({**cls.defaults, **raw})
        if config.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise config.error(
                "use_bidirectional_attention", f"is {config.raw['use_bidirectional_attention']}",
                "only models whose tokens see those before them are supported",
            )  # fmt: skip
        norm, num_layers = cls.norm(config), read_num_layers(config)
        windows = cls.windows(config, num_layers)
        cache_of = _shared_caches(config, windows)
        per_layer_input = config.integer("hidden_size_per_layer_input", 0, MAX_HIDDEN_SIZE, 0)
        mlp, moe = cls.mlp(config), _mixture(config, norm)
        if moe is not None:
            mlp = dataclasses.replace(mlp, output_norm=norm)
        wide = dataclasses.replace(mlp, intermediate_size=2 * mlp.intermediate_size)
        is_wide = config.flag("use_double_wide_mlp", False)
        layers = []
        for layer_idx, window in enumerate(windows):
            attention = _attention(config, layer_idx, window, cache_of[layer_idx], norm)
            is_shared = cache_of[layer_idx] is not None
            layer = LayerArch(
                attention=attention, mlp=wide if is_wide and is_shared else mlp, moe=moe, mixer_norm=norm,
                mixer_post_norm=norm, ffn_norm=norm, ffn_post_norm=norm, output_scale=True,
                per_layer_input=per_layer_input,
            )  # fmt: skip
            layers.append(layer)
        head = HeadArch(norm=norm, soft_cap=config.number("final_logit_softcapping", 0.0, 1e6, 0.0))
        arch = make_arch(config, layers, read_max_positions(config), head=head, is_tied=cls.is_tied)
        size = config.integer("vocab_size_per_layer_input", 1, MAX_VOCAB_SIZE) if per_layer_input else 0
        embedding = EmbeddingArch(scale=arch.hidden_size**0.5, per_layer_vocab_size=size)
        return dataclasses.replace(arch, embedding=embedding)

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """Of all norms."""
        return NormArch(eps=read_norm_eps(config))

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Of all layers but every sixth, and never of the last."""
        return (*read_windows(config, num_layers, 6)[:-1], None)


class Gemma4Conditional(Gemma4):
    """The language model of a Gemma 4 that takes images and sound."""

    text_config = True
    prefixes = ("model.", "model.language_model.", "language_model.model.")
    ignored_tensors = (*Gemma4.ignored_tensors, r"(^|\.)(vision_tower|audio_tower|embed_vision|embed_audio)\.")


def _attention(
    config: FieldReader, layer_idx: int, window: int | None, cache_of: int | None, norm: NormArch
) -> AttentionArch:
    """Layers without a window have heads of another size; their keys may be their values."""
    heads = read_heads(config)
    keys_are_values = window is None and config.flag("attention_k_eq_v", False)
    num_kv_heads, head_size = heads.num_kv_heads, heads.head_size
    if window is None:
        own = _own_fields(config, layer_idx)
        head_size = own.integer("head_dim", 1, MAX_HEAD_SIZE, config.integer("global_head_dim", 1, MAX_HEAD_SIZE))
        if keys_are_values:
            num_kv_heads = config.integer("num_global_key_value_heads", 1, MAX_HEADS, num_kv_heads)
        num_kv_heads = own.integer("num_key_value_heads", 1, MAX_HEADS, num_kv_heads)
        check_divides(config, "num_key_value_heads", num_kv_heads, "num_attention_heads", heads.num_heads)
    kind = "full_attention" if window is None else "sliding_attention"
    rope, _ = parse_rope(config, head_size, read_max_positions(config), kind=kind)
    has_bias = config.flag("attention_bias", False)
    return AttentionArch(
        num_heads=heads.num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=1.0, rope=rope,
        window=window, qkv_bias=has_bias, output_bias=has_bias, head_norm=norm, has_value_norm=cache_of is None,
        keys_are_values=keys_are_values, shares_cache_of=cache_of,
    )  # fmt: skip


def _mixture(config: FieldReader, norm: NormArch) -> MoEArch | None:
    """The experts beside the MLP of every layer."""
    if not config.flag("enable_moe_block", False):
        return None
    num_experts = read_num_experts(config)
    router = RouterArch(norm=norm, logit_scale=read_hidden_size(config) ** -0.5, has_expert_scales=True)
    return MoEArch(
        num_experts=num_experts, num_chosen=config.integer("top_k_experts", 1, min(num_experts, MAX_CHOSEN)),
        intermediate_size=read_intermediate_size(config, "moe_intermediate_size"), router=router,
        activation="gelu_tanh", input_norm=norm, output_norm=norm,
    )  # fmt: skip


def _own_fields(config: FieldReader, layer_idx: int) -> FieldReader:
    """What `per_layer_config` has of a layer."""
    of_layers = config.optional_object("per_layer_config")
    own = None if of_layers is None else of_layers.optional_object(str(layer_idx))
    return own or FieldReader({}, config.source)


def _shared_caches(config: FieldReader, windows: Sequence[int | None]) -> list[int | None]:
    """Per layer: the layer whose cache it reads, for the last ones: the last of its kind before them."""
    num_shared = config.integer("num_kv_shared_layers", 0, MAX_LAYERS, 0)
    num_own = len(windows) - num_shared
    last_of_kind = {window: layer_idx for layer_idx, window in enumerate(windows[: max(num_own, 0)])}
    if any(window not in last_of_kind for window in windows):
        raise config.error(
            "num_kv_shared_layers", f"is {num_shared} of {len(windows)} layers",
            "each kind of layer needs one that has a cache of its own",
        )  # fmt: skip
    return [None if layer_idx < num_own else last_of_kind[window] for layer_idx, window in enumerate(windows)]
