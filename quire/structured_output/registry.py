"""The grammar libraries by name, and which of them are installed. No state."""

from __future__ import annotations

import importlib
import importlib.util

from quire.structured_output.interface import StructuredOutputBackend, Vocabulary

_PLACE = "quire.structured_output.backends"
# Name -> (module of the library, file here, class); in the order in which `auto` asks them.
BACKENDS: dict[str, tuple[str, str, str]] = {
    "xgrammar": ("xgrammar", "xgrammar", "XGrammarBackend"),
    "guidance": ("llguidance", "guidance", "GuidanceBackend"),
    "outlines": ("outlines_core", "outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("lmformatenforcer", "lm_format_enforcer", "LMFormatEnforcerBackend"),
}


def is_installed(backend: str) -> bool:
    """Whether the library of `backend` is there; does not import it."""
    return importlib.util.find_spec(BACKENDS[backend][0]) is not None


def make_backend(backend: str, vocabulary: Vocabulary) -> StructuredOutputBackend:
    """The library of `backend` with a vocabulary; imports it."""
    _, file, name = BACKENDS[backend]
    kind: type[StructuredOutputBackend] = getattr(importlib.import_module(f"{_PLACE}.{file}"), name)
    return kind(vocabulary)
