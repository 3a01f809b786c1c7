"""Architecture -> the class that computes it, of Quire or a plugin, imported when asked for."""

from __future__ import annotations

from quire.config.families.registry import FAMILIES, family_of, known_architectures
from quire.config.model_family import ModelFamily
from quire.errors import ConfigError, ModelError
from quire.models.decoder import DecoderForCausalLM
from quire.plugins import MODEL, find_plugin, import_object


def model_family(architecture: str) -> type[ModelFamily]:
    """The family of `architecture`.

    Raises:
        ModelError: neither Quire nor a plugin has it.
        ConfigError: the plugin that has it cannot be used.
    """
    family = family_of(architecture)
    if family is None:
        raise ModelError(
            f"architecture {architecture!r} is not implemented", hint=f"Quire has {', '.join(known_architectures())}"
        )
    return family


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class of `architecture`.

    Raises:
        ModelError: neither Quire nor a plugin has it.
        ConfigError: the plugin that has it cannot be used.
    """
    value = model_family(architecture).model_class
    found = import_object(value, f"model {architecture!r} ({value})", MODEL.setting)
    if not (isinstance(found, type) and issubclass(found, DecoderForCausalLM)):
        raise ConfigError(
            f"{value} is not derived from DecoderForCausalLM",
            hint="derive it from quire.models.decoder:DecoderForCausalLM", field=MODEL.setting,
        )  # fmt: skip
    return found


def origin_of(architecture: str) -> dict[str, str]:
    """What distinguishes a plugin's model from other models of the same weights; empty for Quire's own."""
    plugin = None if architecture in FAMILIES else find_plugin(MODEL, architecture)
    return {} if plugin is None else {"model": f"{architecture} of {plugin.package} {plugin.version}"}
