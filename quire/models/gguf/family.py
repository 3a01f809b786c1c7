"""What the architectures of GGUF files have in common: metadata as the fields of config.json, names of tensors.

Families derive from `GGUFFamily`, as those of `config.families` do from one another; `registry` has their list. Pure.

Source: llama.cpp, gguf-py/gguf/constants.py and tensor_mapping.py, for keys and names; conversion/*.py, for what
converters do to tensors; src/models/*.cpp, for what an absent key means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.model_arch import LayerArch, ModelArch, NormArch
from quire.config.model_family import ModelFamily, TensorNames
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.rope import rope_fields

GGUF_NAMES: TensorNames = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.embed_positions\.", "position_embd."),
    (r"^model\.embedding_norm\.", "token_embd_norm."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"\.mixer_norm\.", ".attn_norm."),
    (r"\.mixer_post_norm\.", ".post_attention_norm."),
    (r"\.ffn_post_norm\.", ".post_ffw_norm."),
    (r"\.self_attn\.(q|k|v|qkv)_proj\.", r".attn_\1."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.(q|k)_norm\.", r".attn_\1_norm."),
    (r"\.self_attn\.sinks$", ".attn_sinks.weight"),
    (r"\.mlp\.gate_up_proj\.", ".ffn_up."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
    (r"\.moe\.router\.correction$", ".exp_probs_b.bias"),
    (r"\.moe\.router\.", ".ffn_gate_inp."),
    (r"\.moe\.experts\.(\d+)\.(gate|up|down)_proj\.", r".ffn_\2_exps.\1."),
    (r"\.moe\.shared_gate\.", ".ffn_gate_inp_shexp."),
    (r"\.moe\.shared_expert\.(gate|up|down)_proj\.", r".ffn_\1_shexp."),
)
"""Tensors of experts are stacked: `checkpoint` names the part of expert 3 `ffn_up_exps.3.weight`."""

# Fields of config.json -> the keys that they are read from: for messages.
FIELD_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length", "n_embd": "embedding_length", "d_model": "embedding_length",
    "num_hidden_layers": "block_count", "n_layer": "block_count", "n_layers": "block_count",
    "max_position_embeddings": "context_length", "n_positions": "context_length", "seq_length": "context_length",
    "max_seq_len": "context_length", "intermediate_size": "feed_forward_length", "n_inner": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "n_head": "attention.head_count",
    "n_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "num_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon", "rope_theta": "rope.freq_base", "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
    "layer_types": "attention.sliding_window_pattern", "logits_scaling": "logit_scale", "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale", "query_pre_attn_scalar": "attention.scale",
}  # fmt: skip


class GGUFFamily(ModelFamily):
    """An architecture of GGUF files: how its metadata is read, and its tensors are named and stored.

    Attributes:
        architecture: that of config.json which computes it.
        pairs_are_neighbours: converters have reordered the rows of queries and keys, so that rotated pairs are
            neighbours.
        gains_are_whole: converters have added one to gains that Hugging Face's checkpoints store less one.
        window_period: one layer of so many has no window, the last, unless a key says otherwise; 0 = the
            architecture has no windows.
        default_window: tokens of a window where the key is absent; None = no windows then.
        varied: keys of which layers may have different values; config.json gets the first layer's.
        norm_field: what config.json calls the norms' epsilon.
        changes: end of a tensor's name -> how its numbers differ from Hugging Face's, one of `gguf_checkpoint.CHANGES`.
    """

    architecture: ClassVar[str] = ""
    tensor_names = GGUF_NAMES
    pairs_are_neighbours: ClassVar[bool] = False
    gains_are_whole: ClassVar[bool] = False
    window_period: ClassVar[int] = 0
    default_window: ClassVar[int | None] = None
    varied: ClassVar[tuple[str, ...]] = ()
    norm_field: ClassVar[str] = "rms_norm_eps"
    changes: ClassVar[Mapping[str, str]] = {"ffn_gate_inp_shexp.weight": "row"}

    @classmethod
    def config(cls, metadata: Metadata) -> dict[str, object]:
        """The fields of config.json; those without a key are left out, and mean what they mean there.

        Raises:
            ModelError: a key is missing, of a wrong type, or has a value that the architecture does not allow.
        """
        fields = {
            "architectures": [cls.architecture], **common_fields(metadata, cls.head_size(metadata), cls.varied),
            **cls.rope(metadata),
            **cls.norm_fields(metadata), **cls.windows(metadata), **cls.fields(metadata),
        }  # fmt: skip
        # To some families an absent window is not the same as none.
        return {name: value for name, value in fields.items() if value is not None or name == "sliding_window"}

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """What this architecture has beside the common ones, or in their place; None removes a field."""
        return {}

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """The rotary embedding; empty for models without heads."""
        head_size = cls.head_size(metadata)
        return {} if head_size is None else rope_fields(metadata, head_size)

    @classmethod
    def head_size(cls, metadata: Metadata) -> int | None:
        """Elements of a query head, of which the rotary embedding rotates some; None where the model has none."""
        return head_size_of(metadata)

    @classmethod
    def norm_fields(cls, metadata: Metadata) -> dict[str, object]:
        """The epsilon of the norms."""
        key = "attention.layer_norm_rms_epsilon"
        if not metadata.has(key):
            key = "attention.layer_norm_epsilon"
        value = metadata.number(key)
        if value is None:
            raise metadata.missing(key)
        return {cls.norm_field: value}

    @classmethod
    def windows(cls, metadata: Metadata) -> dict[str, object]:
        """`sliding_window` and `layer_types`, of architectures that have windows."""
        if not cls.window_period:
            return {}
        num_layers, window = num_layers_of(metadata), metadata.integer("attention.sliding_window")
        if window is None:
            window = cls.default_window
        if not window:
            return {"sliding_window": None}
        pattern = metadata.file.metadata.get(metadata.key("attention.sliding_window_pattern"))
        if pattern is None or isinstance(pattern, int):
            period = metadata.integer("attention.sliding_window_pattern") or cls.window_period
            has_window = [(layer + 1) % period != 0 for layer in range(num_layers)]
        else:
            found = metadata.per_layer("attention.sliding_window_pattern", num_layers)
            has_window = [bool(value) for value in found or []]
        types = ["sliding_attention" if value else "full_attention" for value in has_window]
        return {"sliding_window": window, "layer_types": types}

    @classmethod
    def as_stored(cls, arch: ModelArch) -> ModelArch:
        """The model whose weights are stored as in GGUF files.

        Args:
            arch: as from the config.json that `config` gives.
        """
        layers = tuple(cls._stored_layer(layer) for layer in arch.layers)
        head = dataclasses.replace(arch.head, norm=cls._stored_norm(arch.head.norm))
        return dataclasses.replace(arch, layers=layers, head=head)

    @classmethod
    def _stored_layer(cls, layer: LayerArch) -> LayerArch:
        attention = layer.attention
        if attention is not None and attention.rope is not None and cls.pairs_are_neighbours:
            rope = dataclasses.replace(attention.rope, is_interleaved=True)
            attention = dataclasses.replace(attention, rope=rope)
        if attention is not None:
            attention = dataclasses.replace(attention, head_norm=cls._stored_norm(attention.head_norm))
        return dataclasses.replace(
            layer, attention=attention,
            mixer_norm=cls._stored_norm(layer.mixer_norm), mixer_post_norm=cls._stored_norm(layer.mixer_post_norm),
            ffn_norm=cls._stored_norm(layer.ffn_norm), ffn_post_norm=cls._stored_norm(layer.ffn_post_norm),
        )  # fmt: skip

    @classmethod
    def _stored_norm(cls, norm: NormArch | None) -> NormArch | None:
        return dataclasses.replace(norm, gain_offset=0.0) if norm is not None and cls.gains_are_whole else norm


def num_layers_of(metadata: Metadata) -> int:
    """Layers of the decoder, without those that predict further tokens."""
    num_layers = metadata.needed_integer("block_count") - (metadata.integer("nextn_predict_layers") or 0)
    if not 1 <= num_layers <= 1000:
        raise metadata.error(metadata.key("block_count"), f"gives {num_layers} layers", "it must be from 1 to 1000")
    return num_layers


def head_size_of(metadata: Metadata) -> int | None:
    """Elements of a query head; None where the model has none.

    Raises:
        ModelError: heads differ between layers, or values have another size than keys.
    """
    num_heads = metadata.one_for_all("attention.head_count", num_layers_of(metadata))
    if not num_heads:
        return None
    head_size = metadata.integer("attention.key_length")
    value_size = metadata.integer("attention.value_length")
    if value_size is not None and head_size is not None and value_size != head_size:
        key = metadata.key("attention.value_length")
        raise metadata.error(key, f"is {value_size}, key_length is {head_size}", "only models with equal ones run")
    return head_size or metadata.needed_integer("embedding_length") // num_heads


def common_fields(metadata: Metadata, head_size: int | None, varied: Sequence[str]) -> dict[str, object]:
    """The fields of config.json that have the same keys in all architectures.

    Args:
        head_size: elements of a query head.
        varied: as of the family.
    """

    def of_layers(name: str) -> int | None:
        values = metadata.per_layer(name, num_layers) if name in varied else None
        return values[0] if values else metadata.one_for_all(name, num_layers)

    if metadata.flag("attention.causal") is False:
        raise metadata.error(metadata.key("attention.causal"), "is false", "encoders are not supported; use a decoder")
    embedding = metadata.tensor("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.error("token_embd.weight", "is missing or has no rows", "download the whole model")
    num_layers = num_layers_of(metadata)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.needed_integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": metadata.needed_integer("context_length"),
        "intermediate_size": of_layers("feed_forward_length"),
        "num_attention_heads": metadata.one_for_all("attention.head_count", num_layers),
        "num_key_value_heads": of_layers("attention.head_count_kv"),
        "head_dim": head_size,
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": end_tokens(metadata),
        "dtype": "bfloat16",
        **expert_fields(metadata),
    }


def end_tokens(metadata: Metadata) -> list[int]:
    """Ids that end a turn: of the sequence, of the turn, of the message."""
    found = (metadata.token(name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if token is not None))


def expert_fields(metadata: Metadata) -> dict[str, object]:
    """Of mixtures; empty without experts."""
    num_experts = metadata.integer("expert_count")
    if not num_experts:
        return {}
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.needed_integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
    }
