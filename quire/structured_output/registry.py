"""The grammar libraries by name, and which of them are installed. No state."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from quire.config.structured_outputs import BACKENDS
from quire.plugins import GRAMMAR_BACKEND, load_plugin, unknown_choice
from quire.structured_output.capabilities import Capabilities
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, StructuredOutputBackend, Vocabulary
from quire.structured_output.one_spelling import Spellings, needs_one_spelling

_PLACE = "quire.structured_output.backends"


def backend_class(backend: str) -> type[StructuredOutputBackend]:
    """The class of a backend: `BACKEND` of the file that is named like it, or a plugin; does not import its library.

    Raises:
        ConfigError: there is none, or the plugin cannot be used.
    """
    if backend not in BACKENDS:
        return _plugin_class(backend)
    kind: type[StructuredOutputBackend] = importlib.import_module(f"{_PLACE}.{backend.replace('-', '_')}").BACKEND
    return kind


def capabilities_of(backend: str) -> Capabilities:
    """What the library of `backend` honours; does not import it."""
    return backend_class(backend).capabilities


@functools.cache  # asked for every request
def _plugin_class(name: str) -> type[StructuredOutputBackend]:
    found: type[StructuredOutputBackend] | None = load_plugin(GRAMMAR_BACKEND, name, StructuredOutputBackend)
    if found is None:
        raise unknown_choice(GRAMMAR_BACKEND, name, ["auto", *BACKENDS])
    return found


def backends_for(kind: str, tag: str | None = None, *, beside: str | None = None) -> tuple[str, ...]:
    """The backends that make grammars of `kind`, in the order in which `auto` asks them.

    Args:
        tag: only those that can write this type of part in structural tags.
        beside: a plugin's backend that is asked, too; the last.
    """
    names = BACKENDS if beside is None or beside in BACKENDS else (*BACKENDS, beside)
    found = ((name, capabilities_of(name)) for name in names)
    return tuple(name for name, library in found if kind in library.kinds and (tag is None or tag in library.tags))


def is_installed(backend: str) -> bool:
    """Whether the library of `backend` is there; does not import it."""
    return importlib.util.find_spec(capabilities_of(backend).module) is not None


def make_backend(backend: str, vocabulary: Vocabulary) -> StructuredOutputBackend:
    """The library of `backend` with a vocabulary; imports it."""
    return _WithOneSpelling(backend_class(backend)(vocabulary))


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
