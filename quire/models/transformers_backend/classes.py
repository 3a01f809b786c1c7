"""The class of transformers that a config.json names, or why Quire cannot serve it. No weight is read here.

Called by `model`. A found class owns its configuration; the models that it builds belong to the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.config.families.registry import known_architectures
from quire.errors import ModelError, UnsupportedError
from quire.models.transformers_backend import attention, experts

FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AttributeError, ImportError)
"""What foreign code raises where it cannot do what is asked of it."""
BATCH_ROPES = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies transformers chooses by the longest sequence of a batch."""


def refusal(architecture: str, reason: str) -> UnsupportedError:
    """The error of a class that cannot be served."""
    return UnsupportedError(
        f"{architecture} of transformers {transformers.__version__} cannot be served: {reason}",
        hint="docs/how-to/transformers-models.md says what a class needs", field="model_impl",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TransformersClass:
    """A class that may be served: what only its code can say is found by `probe`.

    Attributes:
        architecture: its name.
        config: of the model.
    """

    architecture: str
    config: PretrainedConfig

    @property
    def num_layers(self) -> int:
        """Of the decoder."""
        return int(self.config.num_hidden_layers)

    def build_noting(self, dtype: torch.dtype) -> PreTrainedModel:
        """A model whose attention notes what it is asked, on the default device."""
        return self._build(attention.NOTE, dtype)

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """A model whose attention computes, with its buffers filled and its parameters on the meta device."""
        hook: Any = _to_meta  # torch's annotation says None, its documentation a parameter
        registered = nn.modules.module.register_module_parameter_registration_hook(hook)
        try:
            return self._build(attention.ATTEND, dtype).eval()
        finally:
            registered.remove()

    def check_parts(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedError unless decoder, token table and output projection are modules of their own."""
        if getattr(model, model.base_model_prefix, None) in (None, model):
            raise refusal(self.architecture, "its decoder is not a module of its own")
        if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
            raise refusal(self.architecture, "its token table or output projection is not a module of its own")

    def _build(self, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
        attention.register()
        experts.register()
        config = copy.deepcopy(self.config)
        config._experts_implementation = experts.MIX
        try:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=implementation, dtype=dtype, trust_remote_code=False
            )
        except FAILURES as error:
            raise refusal(self.architecture, f"it cannot be built: {first_line(error)}") from error
        assert isinstance(model, PreTrainedModel)
        return model


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """A parameter without memory; what it held was never written."""
    return None if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False)


def find_class(architecture: str, raw: Mapping[str, Any]) -> TransformersClass:
    """The class named `architecture`, for a `config.json` object.

    Raises:
        ModelError: transformers has no such class, or cannot read the object.
        UnsupportedError: the class is of a kind that cannot be served.
    """
    model_type = raw.get("model_type")
    if not hasattr(transformers, architecture):
        raise ModelError(
            f"architecture {architecture[:80]!r} is implemented neither by Quire nor by transformers "
            f"{transformers.__version__}; code in a model's directory is never run",
            hint=f"Quire has {', '.join(known_architectures())}", field="architectures",
        )  # fmt: skip
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise refusal(architecture, f"config.json says model_type {str(model_type)[:80]!r}, which it does not have")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(raw))
    except Exception as error:  # configuration classes raise what they like
        raise ModelError(
            f"transformers cannot read this config.json: {first_line(error)}", hint="correct it", field="config.json"
        ) from error
    _check_kind(architecture, model_type, config)
    kind = getattr(transformers, architecture)
    _check_class(architecture, kind)
    _check_rope(architecture, config)
    return TransformersClass(architecture, config)


def _check_kind(architecture: str, model_type: str, config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(architecture, "it is an encoder with a decoder")
    if config.sub_configs:
        raise refusal(
            architecture, f"it is made of several models ({', '.join(config.sub_configs)}); Quire serves text"
        )
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    if architecture not in ((names,) if isinstance(names, str) else names):
        raise refusal(architecture, "it is not a class for text generation")


def _check_class(architecture: str, kind: type[PreTrainedModel]) -> None:
    if kind._is_stateful:
        raise refusal(architecture, "it has recurrent layers, whose states are not kept in pages")
    if not (kind._supports_attention_backend and kind._can_set_attn_implementation()):
        raise refusal(architecture, "its attention does not go through the attention registry")


def _check_rope(architecture: str, config: PretrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = one.get("rope_type")
        if kind in BATCH_ROPES:
            raise refusal(architecture, f"transformers computes rope_type {kind!r} by the longest sequence of a batch")


def first_line(error: BaseException) -> str:
    """What an exception says, shortened."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
