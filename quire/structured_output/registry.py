"""The grammar libraries by name, and which of them are installed. No state."""

from __future__ import annotations

import importlib
import importlib.util

from quire.structured_output.interface import CompiledGrammar, GrammarSpec, StructuredOutputBackend, Vocabulary
from quire.structured_output.one_spelling import Spellings, needs_one_spelling

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
    return _WithOneSpelling(kind(vocabulary))


class _WithOneSpelling(StructuredOutputBackend):
    """A library whose JSON has one spelling where it must."""

    def __init__(self, backend: StructuredOutputBackend) -> None:
        super().__init__(backend.vocabulary)
        self._backend = backend
        self._spellings = Spellings(backend.vocabulary)

    def compile(self, spec: GrammarSpec) -> bytes:
        return self._backend.compile(spec)

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        grammar = self._backend.load(spec, compiled)
        return self._spellings.guarded(grammar) if needs_one_spelling(spec) else grammar
