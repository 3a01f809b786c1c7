"""What a grammar library honours, as one value that its backend declares. Read by `choose`, before any library loads.

A library accepts more than it honours. What is declared here is what tests have seen: what a keyword forbids cannot be
written (`tests/structured/keyword_cases.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = frozenset(("json", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"))
BASIC_KEYWORDS = frozenset((
    "type", "enum", "const", "anyOf", "$ref", "properties", "required", "additionalProperties", "items", "minItems",
    "maxItems", "minLength", "maxLength", "pattern",
))  # fmt: skip
"""Keywords of JSON Schema that every library here honours."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a library cannot honour a schema: the keyword's place as a JSON pointer, and the reason."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"#{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema within the schema, its path, and the keyword that it is a value of."""

    schema: Any
    path: str
    parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a grammar library honours; what is not declared is refused, or given to another library.

    Attributes:
        module: Python module of the library, by which it is found to be installed.
        kinds: of `KINDS`, what it makes grammars of.
        keywords: of JSON Schema.
        combines_keywords: a keyword holds beside any others and `false` is a schema anywhere; else only where
            `schema.problems` says so.
        has_open_properties: `additionalProperties` may allow further names beside `properties`.
        has_recursion: a reference may lead back to itself.
        has_whitespace_pattern: a request may say what stands between the parts of JSON.
        fast_formats: values of `format` that it compiles at once where others take seconds: with these it comes first.
        regex_features: what a regular expression may hold: "negated", a class of all but some characters.
        pattern_features: the same within a schema; "escaped", characters that JSON writes with escapes, too.
        tags: types of the parts of a `CallGrammar`, or a structural tag, that it can write.
        max_choices: None = any number.
        check_subschema: (schema within a schema, whole schema) -> a problem that the keywords do not tell.
        check_pattern: (pattern in a schema, what `schema.regex` found in it) -> why it is not honoured.
        check_tag: `CallGrammar` -> why it is not honoured.
    """

    module: str
    kinds: frozenset[str]
    keywords: frozenset[str] = frozenset()
    combines_keywords: bool = False
    has_open_properties: bool = False
    has_recursion: bool = True
    has_whitespace_pattern: bool = False
    fast_formats: frozenset[str] = frozenset()
    regex_features: frozenset[str] = frozenset(("negated",))
    pattern_features: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()
    max_choices: int | None = None
    check_subschema: Callable[[Subschema, Any], Problem | None] | None = None
    check_pattern: Callable[[str, frozenset[str]], str | None] | None = None
    check_tag: Callable[[Any], str | None] | None = None
