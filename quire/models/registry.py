"""Architecture -> the class that computes it, of Quire or a plugin, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.model_family import family_of
from quire.errors import ConfigError, ModelError
from quire.models.blocks import DecoderForCausalLM
from quire.plugins import MODEL, find_plugin, import_object, plugin_names

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
        ModelError: neither Quire nor a plugin has it.
        ConfigError: the plugin that has it cannot be used.
    """
    family = family_of(architecture)
    value = MODEL_CLASSES.get(architecture) if family is None else family.model_class
    if value is None:
        known = [*MODEL_CLASSES, *plugin_names(MODEL)]
        raise ModelError(f"architecture {architecture!r} is not implemented", hint=f"Quire has {', '.join(known)}")
    found = import_object(value, f"model {architecture!r} ({value})", MODEL.setting)
    if not (isinstance(found, type) and issubclass(found, DecoderForCausalLM)):
        raise ConfigError(
            f"{value} is not derived from DecoderForCausalLM",
            hint="derive it from quire.models.blocks:DecoderForCausalLM", field=MODEL.setting,
        )  # fmt: skip
    return found


def origin_of(architecture: str) -> dict[str, str]:
    """What distinguishes a plugin's model from other models of the same weights; empty for Quire's own."""
    plugin = None if architecture in MODEL_CLASSES else find_plugin(MODEL, architecture)
    return {} if plugin is None else {"model": f"{architecture} of {plugin.package} {plugin.version}"}
