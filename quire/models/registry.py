"""Architecture -> the class that computes it, of Quire or a plugin, imported when asked for."""

from __future__ import annotations

from importlib.metadata import version

from quire.config.families.registry import FAMILIES, family_of, known_architectures
from quire.config.families.transformers_class import TransformersFamily
from quire.config.model_arch import ModelArch
from quire.config.model_family import ModelFamily
from quire.errors import ConfigError, ModelError
from quire.models.decoder import DecoderForCausalLM
from quire.models.gguf.registry import gguf_family
from quire.models.interfaces import BuildContext, CausalLM
from quire.plugins import MODEL, find_plugin, import_object


def model_family(arch: ModelArch) -> type[ModelFamily]:
    """The family that names a model's tensors: `TransformersFamily` where a class of transformers is to compute it.

    Raises:
        ModelError: neither Quire nor a plugin has it.
        ConfigError: the plugin that has it cannot be used.
    """
    if arch.gguf_architecture:
        return gguf_family(arch.gguf_architecture)
    return TransformersFamily if arch.config_json else own_family(arch.architecture)


def own_family(architecture: str) -> type[ModelFamily]:
    """The family of `architecture`, of Quire or a plugin. Raises as `model_family`."""
    family = family_of(architecture)
    if family is None:
        raise ModelError(
            f"architecture {architecture!r} is not implemented", hint=f"Quire has {', '.join(known_architectures())}"
        )
    return family


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class of `architecture`, of Quire or a plugin.

    Raises:
        ModelError: neither Quire nor a plugin has it.
        ConfigError: the plugin that has it cannot be used.
    """
    value = own_family(architecture).model_class
    found = import_object(value, f"model {architecture!r} ({value})", MODEL.setting)
    if not (isinstance(found, type) and issubclass(found, DecoderForCausalLM)):
        raise ConfigError(
            f"{value} is not derived from DecoderForCausalLM",
            hint="derive it from quire.models.decoder:DecoderForCausalLM", field=MODEL.setting,
        )  # fmt: skip
    return found


def build_model(build: BuildContext) -> CausalLM:
    """The model of `build.arch`, without weights.

    Raises:
        ModelError, ConfigError, UnsupportedError: there is none, or it cannot be served.
    """
    if build.arch.config_json:
        from quire.models.transformers_backend.model import TransformersForCausalLM  # late: loads transformers

        return TransformersForCausalLM(build)
    return model_class(build.arch.architecture)(build).eval()


def origin_of(arch: ModelArch) -> dict[str, str]:
    """What distinguishes a model from Quire's own of the same weights; empty for these."""
    if arch.config_json:
        return {"model": f"{arch.architecture} of transformers {version('transformers')}"}
    plugin = None if arch.architecture in FAMILIES else find_plugin(MODEL, arch.architecture)
    return {} if plugin is None else {"model": f"{arch.architecture} of {plugin.package} {plugin.version}"}
