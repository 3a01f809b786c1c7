"""Llama 4, text: rotated layers within chunks, others over all tokens, and mixtures with a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import (
    MAX_LAYERS,
    read_intermediate_size,
    read_layer_types,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import read_num_chosen, read_num_experts
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import (
    AttentionArch,
    AttentionTemperature,
    ModelArch,
    MoEArch,
    NormArch,
    RouterArch,
)
from quire.config.model_family import LLAMA_NAMES


class Llama4(Llama):
    """Images are refused; their tensors are not read. Source: Meta 2025 (The Llama 4 herd)."""

    tensor_names = (*LLAMA_NAMES, (r"\.(moe|mlp)\.", ".feed_forward."))
    prefixes = ("", "language_model.")
    layouts: ClassVar[Mapping[str, str]] = {"moe.experts": "stacked, transposed"}
    ignored_tensors = (r"^vision_model\.", r"^multi_modal_projector\.")
    text_config = True

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        num_layers, moe = read_num_layers(config), cls.moe(config)
        sparse = cls.sparse_layers(config, num_layers)
        fields = {"rms_norm_eps": 1e-5, **raw, "layer_types": None}
        if len(sparse) < num_layers:
            fields["intermediate_size"] = read_intermediate_size(config, "intermediate_size_mlp")
        arch = super().parse(fields)
        is_rotated = cls.rotated_layers(config, num_layers)
        kinds = read_layer_types(config, num_layers, ("full_attention", "chunked_attention"))
        chunk = config.optional_integer("attention_chunk_size", 1, MAX_POSITIONS)
        if chunk is None and "attention_chunk_size" not in raw:
            chunk = 8192
        layers = []
        for number, layer in enumerate(arch.layers):
            assert layer.attention is not None
            is_chunked = kinds[number] == "chunked_attention" if kinds else is_rotated[number]
            attention = dataclasses.replace(
                cls.rotated(config, layer.attention) if is_rotated[number] else cls.unrotated(config, layer.attention),
                chunk=chunk if is_chunked else None,
            )
            layer = dataclasses.replace(layer, attention=attention)
            layers.append(dataclasses.replace(layer, mlp=None, moe=moe) if number in sparse else layer)
        return dataclasses.replace(arch, layers=tuple(layers))

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def moe(cls, config: FieldReader) -> MoEArch:
        """The mixture of those layers that have one; weights multiply the experts' inputs."""
        num_experts, size = read_num_experts(config), read_intermediate_size(config)
        return MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=size,
            router=RouterArch(scoring="sigmoid", is_normalized=False, weighs_input=True),
            shared_size=size,
        )

    @classmethod
    def sparse_layers(cls, config: FieldReader, num_layers: int) -> set[int]:
        """Those with a mixture: every `interleave_moe_layer_step`th, unless `moe_layers` names them."""
        if config.has("moe_layers"):
            return set(config.integers("moe_layers", 0, num_layers - 1))
        step = config.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1)
        return set(range(step - 1, num_layers, step))

    @classmethod
    def rotated_layers(cls, config: FieldReader, num_layers: int) -> list[bool]:
        """Whether positions enter a layer: not in every `no_rope_layer_interval`th, unless a list says which.

        Raises:
            ModelError: the list has another length.
        """
        flags = config.integers("no_rope_layers", 0, 1)
        if not flags:
            interval = config.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
            return [(number + 1) % interval != 0 for number in range(num_layers)]
        if len(flags) != num_layers:
            raise config.error("no_rope_layers", f"has {len(flags)} layers", f"num_hidden_layers is {num_layers}")
        return [bool(flag) for flag in flags]

    @classmethod
    def rotated(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Neighbours are pairs; norms without gains come after the rotation."""
        assert attention.rope is not None
        norm = NormArch(eps=read_norm_eps(config, default=1e-5), has_gain=False)
        return dataclasses.replace(
            attention,
            rope=dataclasses.replace(attention.rope, is_interleaved=True),
            head_norm=norm if config.flag("use_qk_norm", True) else None,
            norm_after_rope=True,
        )

    @classmethod
    def unrotated(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without positions, but for the scale of queries. Source: Nakanishi 2025 (Scalable-Softmax), section 2."""
        temperature = None
        if config.flag("attn_temperature_tuning", True):
            temperature = AttentionTemperature(
                coefficient=config.number("attn_scale", 0.0, 1e6, 0.1),
                period=config.integer("floor_scale", 1, MAX_POSITIONS, 8192),
                offset=1,
            )
        return dataclasses.replace(attention, rope=None, temperature=temperature)
