"""What tests of grammar libraries share. Tests that need a library which is not installed are skipped."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from quire.config.structured_outputs import BACKENDS
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, StructuredOutputBackend, Vocabulary
from quire.structured_output.registry import is_installed, make_backend

EOS = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), EOS)
"""A vocabulary of single bytes and an end."""

needs_libraries = pytest.mark.skipif(
    not all(map(is_installed, BACKENDS)) or importlib.util.find_spec("jsonschema") is None,
    reason="quire[structured] is not installed",
)
_made: dict[str, StructuredOutputBackend] = {}


def backend(name: str) -> StructuredOutputBackend:
    """A library over `BYTES`, made once."""
    if name not in _made:
        _made[name] = make_backend(name, BYTES)
    return _made[name]


def compiled(name: str, kind: str, text: str, **fields: Any) -> CompiledGrammar:
    """A grammar; raises `GrammarError`."""
    spec = GrammarSpec(kind=kind, text=text, backend=name, **{"any_whitespace": False, **fields})
    return backend(name).load(spec, backend(name).compile(spec))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole of `text` may be written, and then the answer end."""
    state = grammar.start()
    return all(state.accept(byte) for byte in text.encode()) and state.accept(EOS)


def as_json(value: Any) -> str:
    """A value without whitespace."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
