"""Which code computes a model: a family of Quire's or a plugin's, or a class of transformers.

Called where a configuration is resolved. Looks whether transformers is installed, and does not import it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from quire.config.families.registry import family_of, parse_config
from quire.config.families.transformers_class import parse_transformers
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import ModelArch
from quire.errors import ModelError, UnsupportedError

INSTALL = "pip install 'quire[transformers]'"


def choose_arch(raw: Mapping[str, object], model_impl: str) -> ModelArch:
    """The shape that a `config.json` object describes; with `config_json` where transformers is to compute it.

    Args:
        model_impl: the setting.

    Raises:
        ModelError: no family has the architecture and transformers is not to be used; or as `parse_config`.
        UnsupportedError: transformers is to compute it and is not installed, or cannot.
    """
    if model_impl == "transformers":
        if not _is_installed():
            raise UnsupportedError(
                "model_impl='transformers' needs the library, which is not installed", hint=INSTALL, field="model_impl"
            )
        return parse_transformers(raw)
    named = FieldReader(raw).texts("architectures")
    if model_impl == "auto" and named and not any(family_of(name) for name in named):
        if _has_class(named[0]):
            return parse_transformers(raw)
        if not _is_installed():
            raise ModelError(
                f"architecture {named[0][:80]!r} is not implemented by Quire, and transformers is not installed",
                hint=f"{INSTALL} runs many others (docs/how-to/transformers-models.md)", field="architectures",
            )  # fmt: skip
    return parse_config(raw)


def _is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _has_class(name: str) -> bool:
    """Whether transformers' table of classes has the name; the table is read as text."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    table = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    return not table.exists() or f'"{name}"' in table.read_text()
