"""llguidance (https://github.com/guidance-ai/llguidance): derivative-based lexer and Earley parser, no precomputation.

Its grammars cannot cross between processes, so what a worker has found quick and small is compiled here once more.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.structured_output.capabilities import BASIC_KEYWORDS, Capabilities
from quire.structured_output.eos_tracking import EosTrackingMatcher
from quire.structured_output.interface import (
    CompiledGrammar,
    GrammarError,
    GrammarSpec,
    Matcher,
    StructuredOutputBackend,
    Vocabulary,
)
from quire.structured_output.schema.formats import EXPENSIVE
from quire.structured_output.schema.lengths import with_format_patterns
from quire.structured_output.schema.regex_normal import has_nul
from quire.structured_output.structural_tags import grammar_of_text, with_schemas
from quire.structured_output.tag_lark import TAGS, at_most, lark_of, lark_problem


class _Tokens:
    """The vocabulary in the form that the library asks for; it tokenizes byte by byte, which is all it needs."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_id
        # A token without bytes must not be taken for the empty text.
        self.tokens: Sequence[bytes] = [
            piece or b"\xff<|%d|>" % token_id for token_id, piece in enumerate(vocabulary.pieces)
        ]
        self.special_token_ids = [token_id for token_id, piece in enumerate(vocabulary.pieces) if not piece]
        self._ids = {piece: token_id for token_id, piece in reversed(list(enumerate(vocabulary.pieces))) if piece}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._ids]


def _check_pattern(pattern: str, found: frozenset[str]) -> str | None:
    """With NUL beside other classes the library may allow escapes that the pattern does not (`regex_normal.normal`)."""
    return "a pattern that names NUL is not supported" if has_nul(pattern) else None


class GuidanceBackend(StructuredOutputBackend):
    """Nothing crosses but that it can be compiled."""

    capabilities = Capabilities(
        module="llguidance",
        kinds=frozenset(("json", "json_object", "regex", "choice", "lark", "structural_tag")),
        keywords=BASIC_KEYWORDS | {
            "prefixItems", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties", "additionalItems",
            "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$anchor",
        },
        combines_keywords=True,
        has_whitespace_pattern=True,
        fast_formats=EXPENSIVE,
        pattern_features=frozenset(("negated", "escaped")),
        tags=TAGS,
        check_pattern=_check_pattern,
        check_tag=lark_problem,
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._library = importlib.import_module("llguidance")
        self._newest: tuple[GrammarSpec, Any] | None = None
        self._tokens = self._library.LLTokenizer(_Tokens(vocabulary), n_vocab=vocabulary.vocab_size)

    def compile(self, spec: GrammarSpec) -> bytes:
        """Try it, and keep it for a `load` that follows here."""
        matcher = self._matcher(spec)
        self._newest = (spec, matcher)
        bitmask = np.empty((1, self.vocabulary.bitmask_size), dtype=np.int32)
        _fill(matcher, bitmask, 0)
        return b""

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        """Compile it here, unless `compile` has just done that."""
        newest, self._newest = self._newest, None
        matcher = newest[1] if newest is not None and newest[0] is spec else self._matcher(spec)
        return _Compiled(matcher, self.vocabulary.eos_token_id)

    def _matcher(self, spec: GrammarSpec) -> Any:
        try:
            grammar = self._grammar(spec)
        except ValueError as error:
            raise GrammarError(_one_line(str(error))) from None
        matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0)
        _check(matcher)
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(_one_line("; ".join(warnings)))
        return matcher

    def _grammar(self, spec: GrammarSpec) -> str:
        make = self._library.LLMatcher
        options: dict[str, Any] = {"whitespace_flexible": spec.any_whitespace, "coerce_one_of": False}
        if spec.any_whitespace and spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        if spec.kind == "structural_tag":
            calls = with_schemas(grammar_of_text(spec.text), with_format_patterns)
            return str(make.grammar_from_lark(lark_of(calls, options)))
        if spec.kind == "json":
            if spec.any_whitespace and spec.whitespace_pattern is None and spec.max_whitespace_cnt is not None:
                options["whitespace_pattern"] = at_most(spec.max_whitespace_cnt)
            schema = json.dumps(with_format_patterns(json.loads(spec.text)), ensure_ascii=False)
            return str(make.grammar_from_json_schema(schema, overrides=options))
        if spec.kind == "regex":
            return str(make.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
            return str(make.grammar_from_lark(f"start: {texts}"))
        return str(make.grammar_from_lark(spec.text))


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: Any, eos_token_id: int) -> None:
        self._matcher = matcher
        self._eos_token_id = eos_token_id

    def start(self) -> Matcher:
        return _Guidance(self._matcher.deep_copy(), self._eos_token_id)


class _Guidance(EosTrackingMatcher):
    def __init__(self, matcher: Any, eos_token_id: int) -> None:
        super().__init__(eos_token_id)
        self._matcher = matcher

    def _is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _advance(self, token_id: int) -> bool:
        # A token that is not allowed would leave the library in a state of error for good.
        if self._matcher.validate_tokens([token_id]) != 1:
            return False
        return bool(self._matcher.consume_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        _fill(self._matcher, bitmask, row)


def _fill(matcher: Any, bitmask: np.ndarray, row: int) -> None:
    line = bitmask[row]
    matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
    _check(matcher)


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))


def _one_line(text: str) -> str:
    """What the library says of a grammar, without the state of its parser, which it appends."""
    reason = " ".join(text.partition("<state>")[0].split())[:500]
    return "no text follows it" if reason == "NoExtensionBias" else reason


BACKEND = GuidanceBackend
