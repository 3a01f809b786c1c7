"""ModelFamily: how the `config.json` of a family is read, and how its checkpoints name and store tensors.

Quire's own families (`config.families`) and those of other packages have the same form. Called where a model directory
is read, by processes without torch, and by the model's constructor. Pure. docs/how-to/add-a-model.md has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.model_arch import ModelArch
from quire.errors import ModelError

TensorNames = tuple[tuple[str, str], ...]
"""Patterns of module names -> what the checkpoint has in their place; applied one after the other (`re.sub`)."""

LLAMA_NAMES: TensorNames = (
    (r"\.mixer_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
)


class ModelFamily:
    """An architecture. A package's plugin is a subclass, of this or of a family that it resembles.

    The modules of the decoder are named `model.embed_tokens`, `model.layers.0.self_attn.q_proj`, `...k_proj`,
    `...v_proj`, `...o_proj`, `model.layers.0.mlp.gate_proj`, `...up_proj`, `...down_proj`, `model.layers.0.mixer_norm`,
    `...mixer_post_norm`, `...ffn_norm`, `...ffn_post_norm`, `model.norm` and `lm_head`.

    Attributes:
        quire_contract: of a plugin: the version of this interface that it was written for.
        model_class: "module:Class" of a `quire.models.decoder.DecoderForCausalLM`; imported by the worker alone.
        tensor_names: from this program's names to the checkpoint's.
        prefixes: what checkpoint names may begin with; the first is what `tensor_names` give. Files of the base model
            alone lack it.
        layouts: module name within a layer -> how checkpoints store it, one of `models.tensor_layouts`, or for
            "moe.experts" of `models.expert_layouts`.
        ignored_tensors: patterns of checkpoint names that are not needed.
        text_config: the model's fields are in `text_config` of config.json where there is such an object.
    """

    model_class: ClassVar[str] = "quire.models.decoder:DecoderForCausalLM"
    tensor_names: ClassVar[TensorNames] = LLAMA_NAMES
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    layouts: ClassVar[Mapping[str, str]] = {}
    ignored_tensors: ClassVar[tuple[str, ...]] = ()
    text_config: ClassVar[bool] = False

    @classmethod
    def names(cls, arch: ModelArch) -> TensorNames:
        """`tensor_names`, of families in which they depend on the model's shape."""
        return cls.tensor_names

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """The model's shape.

        Args:
            raw: the object in config.json.

        Raises:
            ModelError: a field is missing or has a value that the model does not allow.
        """
        raise ModelError(
            f"family {cls.__name__} does not read config.json",
            hint="give it a parse method, or derive it from one that has",
        )
