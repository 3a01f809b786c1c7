"""Architecture -> the class that computes it, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from quire.errors import ModelError
from quire.models.blocks import DecoderForCausalLM

# The keys are those of `config.hf_config.ARCHITECTURES`, which torch-free code reads.
MODEL_CLASSES: Mapping[str, str] = {
    "LlamaForCausalLM": "quire.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "quire.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "quire.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "quire.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class of `architecture`.

    Raises:
        ModelError: it is not among them.
    """
    if architecture not in MODEL_CLASSES:
        raise ModelError(
            f"architecture {architecture!r} is not implemented", hint=f"Quire has {', '.join(MODEL_CLASSES)}"
        )
    module_name, class_name = MODEL_CLASSES[architecture].split(":")
    found = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(found, type) and issubclass(found, DecoderForCausalLM)):
        raise TypeError(f"{MODEL_CLASSES[architecture]} is not a DecoderForCausalLM")
    return found
