"""DeepSeek V2 and V3 and what is computed as they are: latent attention, and mixtures behind some dense layers.

Source: DeepSeek-AI 2024 (DeepSeek-V2), sections 2.1 and 2.2; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from quire.config.hf_config import (
    MAX_LAYERS,
    make_arch,
    read_activation,
    read_intermediate_size,
    read_norm_eps,
    read_num_layers,
)
from quire.config.hf_fields import FieldReader
from quire.config.hf_latent import read_latent_attention
from quire.config.hf_moe import MLP_MIXTURE_NAMES, read_grouped_router, read_num_chosen, read_num_experts
from quire.config.model_arch import HeadArch, LayerArch, MLPArch, ModelArch, MoEArch, NormArch, RouterArch
from quire.config.model_family import ModelFamily


class DeepseekV2(ModelFamily):
    """A softmax router, greedy or limited to the best groups of experts.

    Attributes:
        defaults: what transformers takes for fields that are absent.
    """

    tensor_names = ((r"\.moe\.shared_expert\.", ".mlp.shared_experts."), *MLP_MIXTURE_NAMES)
    defaults: ClassVar[Mapping[str, object]] = {
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_shared_experts": 2,
    }  # fmt: skip

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader({**cls.defaults, **raw})
        attention, longest = read_latent_attention(config, is_interleaved=cls.is_interleaved(config))
        norm = NormArch(eps=read_norm_eps(config))
        dense = MLPArch(intermediate_size=read_intermediate_size(config), activation=read_activation(config))
        layer = LayerArch(latent_attention=attention, mlp=dense, mixer_norm=norm, ffn_norm=norm)
        num_layers = read_num_layers(config)
        num_dense = min(num_layers, cls.num_dense_layers(config, num_layers))
        layers = [layer] * num_dense
        if num_dense < num_layers:
            sparse = dataclasses.replace(layer, mlp=None, moe=cls.mixture(config))
            layers += [sparse] * (num_layers - num_dense)
        return make_arch(config, layers, longest, head=HeadArch(norm=norm))

    @classmethod
    def is_interleaved(cls, config: FieldReader) -> bool:
        """Whether pairs of rotated elements are neighbours."""
        return True

    @classmethod
    def num_dense_layers(cls, config: FieldReader, num_layers: int) -> int:
        """How many of the first layers are dense."""
        if config.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
            raise config.error("moe_layer_freq", f"is {config.raw['moe_layer_freq']}", "only 1 is supported")
        return config.integer("first_k_dense_replace", 0, MAX_LAYERS)

    @classmethod
    def mixture(cls, config: FieldReader) -> MoEArch:
        """The feed-forward network of the other layers."""
        num_experts = read_num_experts(config)
        num_chosen = read_num_chosen(config, num_experts)
        size = read_intermediate_size(config, "moe_intermediate_size")
        return MoEArch(
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate_size=size,
            router=cls.router(config, num_experts, num_chosen),
            activation=read_activation(config),
            shared_size=size * config.integer("n_shared_experts", 0, 64, 0),
        )

    @classmethod
    def router(cls, config: FieldReader, num_experts: int, num_chosen: int) -> RouterArch:
        """How experts are chosen and weighed."""
        if config.flag("norm_topk_prob", False):
            raise config.error("norm_topk_prob", "is true", "this family does not normalize weights; set it to false")
        router = RouterArch(is_normalized=False, scale=config.number("routed_scaling_factor", 0.0, 1e6))
        if config.text("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
            return router
        return read_grouped_router(config, num_experts, num_chosen, router)


class DeepseekV3(DeepseekV2):
    """A sigmoid router with a correction that balances the experts. Kimi K2 too."""

    # The layer behind the last one predicts a second token.
    ignored_tensors = (r"^model\.layers\.61\.",)
    defaults: ClassVar[Mapping[str, object]] = {
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    }  # fmt: skip

    @classmethod
    def is_interleaved(cls, config: FieldReader) -> bool:
        """As `rope_interleave` says."""
        return config.flag("rope_interleave", True)

    @classmethod
    def router(cls, config: FieldReader, num_experts: int, num_chosen: int) -> RouterArch:
        """As `DeepseekV2.router`."""
        config.text("topk_method", ("noaux_tc",), "noaux_tc")
        config.text("scoring_func", ("sigmoid",), "sigmoid")
        router = RouterArch(
            scoring="sigmoid",
            is_normalized=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 0.0, 1e6),
            group_score="top2",
            has_correction=True,
        )
        return read_grouped_router(config, num_experts, num_chosen, router)


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: one group of experts, and `mlp_layer_types` say which layers are dense."""

    ignored_tensors = (r"^model\.layers\.47\.",)
    defaults: ClassVar[Mapping[str, object]] = {
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip

    @classmethod
    def num_dense_layers(cls, config: FieldReader, num_layers: int) -> int:
        """The first ones of `mlp_layer_types`; one without the field."""
        kinds = config.texts("mlp_layer_types")
        if not kinds:
            return super().num_dense_layers(config, num_layers)
        num_dense = sum(kind == "dense" for kind in kinds)
        if list(kinds) != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
            raise config.error(
                "mlp_layer_types", "mixes dense and sparse layers", "dense layers must come first, one kind for each"
            )
        return num_dense
