"""xgrammar (https://xgrammar.mlc.ai): context-free grammars with masks precomputed by vocabulary. The default.

Source: Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models".
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from quire.core.call_grammar import TYPES
from quire.structured_output.capabilities import BASIC_KEYWORDS, Capabilities, Problem, Subschema
from quire.structured_output.foreign import import_xgrammar
from quire.structured_output.interface import (
    CompiledGrammar,
    GrammarError,
    GrammarSpec,
    Matcher,
    StructuredOutputBackend,
    Vocabulary,
)
from quire.structured_output.schema.keywords import BY_TYPE, types_of
from quire.structured_output.schema.lengths import with_patterns
from quire.structured_output.structural_tags import grammar_of_text, tag_of, token_ids_of, with_schemas

MAX_VOCABULARIES = 4
"""Sets of named control tokens for which the vocabulary is kept."""


def _check_numbers(place: Subschema, root: Any) -> Problem | None:
    if not isinstance(place.schema, dict):
        return None
    schema, types = place.schema, types_of(place.schema)
    bounds = sorted(BY_TYPE["number"] & set(schema))
    if "multipleOf" in bounds and ("number" in types or len(bounds) > 1):
        return Problem(f"{place.path}/multipleOf", "multipleOf is supported only for integers without bounds")
    for keyword in bounds:
        if "integer" in types and not isinstance(schema[keyword], int):
            return Problem(f"{place.path}/{keyword}", f"{keyword} of an integer must be an integer")
    return None


class XGrammarBackend(StructuredOutputBackend):
    """Compiled grammars cross as the library's own JSON."""

    capabilities = Capabilities(
        module="xgrammar",
        kinds=frozenset(("json", "json_object", "regex", "choice", "ebnf", "structural_tag")),
        keywords=BASIC_KEYWORDS | {
            "prefixItems", "allOf", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
            "unevaluatedItems", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        },
        has_open_properties=True,
        regex_features=frozenset(),  # the others of a negated class are halves of surrogate pairs, too
        tags=TYPES,
        check_subschema=_check_numbers,
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._library = import_xgrammar()
        self._tokens: OrderedDict[frozenset[int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile on one thread, without the library's own cache."""
        compiler = self._library.GrammarCompiler(self._tokens_for(spec), max_threads=1, cache_enabled=False)
        try:
            compiled = _compile(compiler, spec)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_first_line(error)) from None
        bitmask = np.full((1, self.vocabulary.bitmask_size), -1, dtype=np.int32)
        self._library.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask, 0)
        if not bitmask.any():
            raise GrammarError("no string satisfies it")
        return str(compiled.serialize_json()).encode()

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        """Read it back."""
        grammar = self._library.CompiledGrammar.deserialize_json(compiled.decode(), self._tokens_for(spec))
        return _Compiled(self._library, grammar)

    def _tokens_for(self, spec: GrammarSpec) -> Any:
        """The vocabulary as the library has it; control tokens that a tag names get bytes that no text has.

        Without bytes the library would never allow them, and with bytes in every grammar it would in free text. Their
        own text is part of them, so that free text which excludes it excludes the token, too.
        """
        pieces, eos_token_id = self.vocabulary.pieces, self.vocabulary.eos_token_id
        named = token_ids_of(grammar_of_text(spec.text)) if spec.kind == "structural_tag" else frozenset()
        key = frozenset(one for one in named if 0 <= one < len(pieces) and not pieces[one] and one != eos_token_id)
        with self._lock:
            if key not in self._tokens:
                given = list(pieces)
                for one in key:
                    given[one] = b"\xff" + self.vocabulary.special_pieces.get(one, b"<|%d|>" % one)
                self._tokens[key] = self._library.TokenizerInfo(
                    given, vocab_size=len(pieces), stop_token_ids=[eos_token_id]
                )
            self._tokens.move_to_end(key)
            if len(self._tokens) > MAX_VOCABULARIES:
                self._tokens.popitem(last=False)
            return self._tokens[key]


class _Compiled(CompiledGrammar):
    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled

    def start(self) -> Matcher:
        return _XGrammar(self._library.GrammarMatcher(self._compiled))


class _XGrammar(Matcher):
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        # The library leaves a line as it is when everything is allowed.
        bitmask[row] = -1
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())


def _compile(compiler: Any, spec: GrammarSpec) -> Any:
    if spec.kind == "json":
        separators = None if spec.any_whitespace else (",", ":")
        return compiler.compile_json_schema(
            json.dumps(with_patterns(json.loads(spec.text))),
            any_whitespace=spec.any_whitespace,
            separators=separators,
            max_whitespace_cnt=spec.max_whitespace_cnt if spec.any_whitespace else None,
            strict_mode=True,
        )
    if spec.kind == "regex":
        return compiler.compile_regex(spec.text)
    if spec.kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(quoted, json.loads(spec.text))))
    if spec.kind == "structural_tag":
        return compiler.compile_structural_tag(
            json.dumps(tag_of(with_schemas(grammar_of_text(spec.text), with_patterns)))
        )
    return compiler.compile_grammar(spec.text)


def quoted(text: str) -> str:
    """A literal of the library's EBNF."""
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


BACKEND = XGrammarBackend
