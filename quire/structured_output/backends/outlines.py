"""outlines-core (https://github.com/dottxt-ai/outlines-core): regular languages as an index of states over tokens.

Source: Willard and Louf 2023, "Efficient Guided Generation for Large Language Models", section 3.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import numpy as np

from quire.structured_output.capabilities import BASIC_KEYWORDS, Capabilities
from quire.structured_output.eos_tracking import EosTrackingMatcher
from quire.structured_output.interface import (
    MAX_ROLLBACK,
    CompiledGrammar,
    GrammarError,
    GrammarSpec,
    Matcher,
    StructuredOutputBackend,
    Vocabulary,
)
from quire.structured_output.schema.regex_normal import classes_of

WHITESPACE = r"[ \n\t]"
ANY_WHITESPACE = WHITESPACE + "*"
MAX_WHITESPACE = 8
"""Characters in a row, where they are bounded: each is a state of the automaton at every place that may have some."""


def _check_pattern(pattern: str, found: frozenset[str]) -> str | None:
    if any(low <= ord(one) <= high for low, high in classes_of(pattern) for one in '"\\\n'):
        return "a class that contains quotes, backslashes or control characters is not supported"
    return "anchors next to an alternation are not supported" if found >= {"|", "^$"} else None


class OutlinesBackend(StructuredOutputBackend):
    """The index crosses in the library's own binary form."""

    capabilities = Capabilities(
        module="outlines_core",
        kinds=frozenset(("json", "regex", "choice")),
        keywords=BASIC_KEYWORDS,
        has_recursion=False,
        has_whitespace_pattern=True,
        check_pattern=_check_pattern,
    )

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._library = importlib.import_module("outlines_core")
        self._tokens: Any = None

    def compile(self, spec: GrammarSpec) -> bytes:
        """Make the index."""
        try:
            index = self._library.Index(self._regex(spec), self._vocabulary())
        except (ValueError, TypeError, RuntimeError) as error:
            raise GrammarError(" ".join(str(error).split())[:500]) from None
        _, (binary,) = index.__reduce__()
        return bytes(binary)

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        """Read it back."""
        return _Compiled(self._library, self._library.Index.from_binary(compiled), self.vocabulary.eos_token_id)

    def _vocabulary(self) -> Any:
        if self._tokens is None:
            ids: dict[bytes, list[int]] = {}
            for token_id, piece in enumerate(self.vocabulary.pieces):
                if piece:
                    ids.setdefault(piece, []).append(token_id)
            self._tokens = self._library.Vocabulary(self.vocabulary.eos_token_id, ids)
        return self._tokens

    def _regex(self, spec: GrammarSpec) -> str:
        if spec.kind == "regex":
            return spec.text
        if spec.kind == "choice":
            return "|".join(f"({re.escape(text)})" for text in json.loads(spec.text))
        if spec.kind == "json":
            limit = spec.max_whitespace_cnt
            allowed = ANY_WHITESPACE if limit is None else f"{WHITESPACE}{{0,{min(limit, MAX_WHITESPACE)}}}"
            whitespace = (spec.whitespace_pattern or allowed) if spec.any_whitespace else ""
            return str(self._library.json_schema.build_regex_from_schema(spec.text, whitespace))
        raise GrammarError(f"{spec.kind} is not a regular language")


class _Compiled(CompiledGrammar):
    def __init__(self, library: Any, index: Any, eos_token_id: int) -> None:
        self._library = library
        self._index = index
        self._eos_token_id = eos_token_id

    def start(self) -> Matcher:
        return _Outlines(self._library.Guide(self._index, MAX_ROLLBACK), self._eos_token_id)


class _Outlines(EosTrackingMatcher):
    def __init__(self, guide: Any, eos_token_id: int) -> None:
        super().__init__(eos_token_id)
        self._guide = guide

    def _is_complete(self) -> bool:
        return self._eos_token_id in self._guide.get_tokens()

    def _advance(self, token_id: int) -> bool:
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, False)
        return True

    def _take_back(self, num_tokens: int) -> None:
        self._guide.rollback_state(num_tokens)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        line = bitmask[row]
        line[:] = 0
        self._guide.write_mask_into(line.ctypes.data, line.size, line.itemsize)


BACKEND = OutlinesBackend
