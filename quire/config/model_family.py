"""ModelFamily: what a package says about a model that it adds, and the shape of whatever model a config.json describes.

Called where a model directory is read, by processes without torch: a family names its model's class and does not
import it. Pure. docs/how-to/plugins.md has an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from quire.config.hf_config import ARCHITECTURES, ModelArch, parse_hf_config
from quire.errors import ConfigError, QuireError
from quire.plugins import MODEL, load_plugin


class ModelFamily:
    """An architecture of another package's: a plugin, whose name is that in `architectures` of config.json.

    Attributes:
        quire_contract: the version of this interface that it was written for.
        model_class: "module:Class" of a `quire.models.blocks.DecoderForCausalLM`; imported by the worker alone.
        like: the architecture of Quire's by whose rules config.json is read, unless `parse` does it.
    """

    model_class: ClassVar[str]
    like: ClassVar[str] = "LlamaForCausalLM"

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """The model's shape.

        Args:
            raw: the object in config.json.

        Raises:
            ModelError: a field is missing or has a value that the model does not allow.
        """
        arch = parse_hf_config({**raw, "architectures": [cls.like]})
        return dataclasses.replace(arch, model_type=str(raw.get("model_type") or arch.model_type))


def family_of(architecture: str) -> type[ModelFamily] | None:
    """The plugin that adds an architecture; None when no package does, or Quire has it itself.

    Raises:
        ConfigError: it cannot be used.
    """
    if architecture in ARCHITECTURES:
        return None
    found: type[ModelFamily] | None = load_plugin(MODEL, architecture, ModelFamily)
    if found is not None and ":" not in str(getattr(found, "model_class", "")):
        raise ConfigError(
            f"{found.__module__}:{found.__qualname__} does not name the class of its model",
            hint="write model_class = 'module:Class' in it", field=MODEL.setting,
        )  # fmt: skip
    return found


def parse_config(raw: Mapping[str, object]) -> ModelArch:
    """The shape that a `config.json` object describes, of a model of Quire's or of a plugin's.

    Raises:
        ModelError: as `parse_hf_config`.
        ConfigError: the plugin cannot be used.
    """
    named = _names(raw)
    if not any(name in ARCHITECTURES for name in named):
        for name in named:
            family = family_of(name)
            if family is not None:
                return _parsed(family, name, raw)
    return parse_hf_config(raw)


def _names(raw: Mapping[str, object]) -> list[str]:
    named: Any = raw.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _parsed(family: type[ModelFamily], name: str, raw: Mapping[str, object]) -> ModelArch:
    place = f"{family.__module__}:{family.__qualname__}.parse"
    try:
        arch = family.parse(raw)
    except QuireError:
        raise
    except Exception as error:  # a foreign method may raise anything
        raise ConfigError(
            f"{place} failed: {type(error).__name__}: {error}", hint="correct config.json or the plugin",
            field=MODEL.setting,
        ) from error  # fmt: skip
    if not isinstance(arch, ModelArch):
        raise ConfigError(f"{place} returned {type(arch).__name__}", hint="return a ModelArch", field=MODEL.setting)
    return dataclasses.replace(arch, architecture=name)
