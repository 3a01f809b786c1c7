"""The `ModelArch` of a model that a class of transformers computes: what planners need, by the usual fields.

Called where a model directory is read, by processes that do not load transformers. What the class really asks for is
found by `models.transformers_backend` before weights are read. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from quire.config.hf_config import make_arch, read_heads, read_max_positions, read_num_layers
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import AttentionArch, HeadArch, LayerArch, MLPArch, ModelArch, MoEArch
from quire.config.model_family import ModelFamily
from quire.config.quantized_checkpoint import read_quantization
from quire.errors import UnsupportedError

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k"),
}
"""Field -> what classes call it too."""
OTHER_INPUTS = ("vision_config", "audio_config")


class TransformersFamily(ModelFamily):
    """In the place of a family, for every class of transformers."""

    model_class = "quire.models.transformers_backend.model:TransformersForCausalLM"


def parse_transformers(raw: Mapping[str, object]) -> ModelArch:
    """The shape that a `config.json` object seems to describe; the object itself is in `config_json`.

    Raises:
        ModelError: a size is missing or out of range, or the checkpoint has an unknown quantization.
        UnsupportedError: the model is not made for text alone, or has an encoder.
    """
    config = FieldReader(_with_usual_names(raw))
    name = _architecture(config)
    _refuse_kinds(config, name)
    num_layers = read_num_layers(config)
    windows = _windows(config, num_layers)
    heads = read_heads(config)
    layers = []
    for window in windows:
        attention = AttentionArch(
            num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size,
            scale=heads.head_size**-0.5, window=window,
        )  # fmt: skip
        layers.append(_with_ffn(config, LayerArch(attention=attention)))
    arch = make_arch(config, layers, read_max_positions(config), head=HeadArch())
    return dataclasses.replace(
        arch, architecture=name, model_type=str(raw.get("model_type") or ""), config_json=json.dumps(dict(raw)),
        quantization=read_quantization(raw),
    )  # fmt: skip


def _with_usual_names(raw: Mapping[str, object]) -> dict[str, object]:
    fields = dict(raw)
    for name, others in OTHER_NAMES.items():
        given = [raw[other] for other in others if raw.get(other) is not None]
        if fields.get(name) is None and given:
            fields[name] = given[0]
    if raw.get("multi_query") is True and raw.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = 1
    return fields


def _architecture(config: FieldReader) -> str:
    named = config.texts("architectures")
    if not named:
        raise config.error("architectures", "is missing", "add a list with the name of the model's class")
    return named[0]


def _refuse_kinds(config: FieldReader, name: str) -> None:
    problem = None
    if config.flag("is_encoder_decoder", False):
        problem = "it is an encoder with a decoder"
    elif any(config.has(field) for field in OTHER_INPUTS):
        problem = "it takes more than text"
    if problem is not None:
        raise UnsupportedError(
            f"{name} cannot be served by transformers' code: {problem}",
            hint="Quire serves decoders of text", field="architectures",
        )  # fmt: skip


def _windows(config: FieldReader, num_layers: int) -> list[int | None]:
    window = config.optional_integer("sliding_window", 1, 1 << 24)
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        return [None] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _with_ffn(config: FieldReader, layer: LayerArch) -> LayerArch:
    hidden_size = config.integer("hidden_size", 1, 1 << 16)
    size = config.integer("intermediate_size", 1, 1 << 20, 4 * hidden_size)
    num_experts = config.optional_integer("num_experts", 0, 1 << 16)
    if not num_experts:
        return dataclasses.replace(layer, mlp=MLPArch(intermediate_size=size))
    moe = MoEArch(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", 1, 1 << 16, 1),
        intermediate_size=config.integer("moe_intermediate_size", 1, 1 << 20, size),
    )
    return dataclasses.replace(layer, moe=moe)
