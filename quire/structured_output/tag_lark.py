"""A `CallGrammar` as a Lark grammar of llguidance, as far as one can say it. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire.core.call_grammar import (
    CallGrammar,
    Choice,
    Literal,
    Maybe,
    OneOrMore,
    Schema,
    SeparatedTags,
    Sequence,
    Tag,
    Token,
    ZeroOrMore,
)

_PARTS = (Literal, Token, Schema, Sequence, Choice, OneOrMore, ZeroOrMore, Maybe, Tag, SeparatedTags)
TAGS = frozenset(str(part.__struct_config__.tag) for part in _PARTS)
"""Types of the parts that it can say."""


class UnsupportedTagError(Exception):
    """A part that Lark has no words for; says which."""


def lark_problem(grammar: CallGrammar) -> str | None:
    """Why it cannot be said in Lark; None when it can."""
    try:
        lark_of(grammar, {})
    except UnsupportedTagError as error:
        return str(error)
    return None


def lark_of(grammar: CallGrammar, options: Mapping[str, Any]) -> str:
    """The text of a grammar that has no problem.

    Args:
        options: how JSON is written, in llguidance's words.
    """
    rules = _Rules(options)
    start = rules.expression(grammar)
    return "\n".join([f"start: {start}", *rules.lines])


def at_most(limit: int) -> str:
    """The library's pattern of so many whitespace characters."""
    return rf"[ \t\n\r]{{0,{limit}}}"


class _Rules:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self.lines: list[str] = []

    def expression(self, part: CallGrammar) -> str:
        """What stands for `part` in a rule; rules that it needs are added."""
        match part:
            case Literal(value):
                return json.dumps(value, ensure_ascii=False)
            case Token(int(token_id)):
                return f"<[{token_id}]>"
            case Schema():
                return self._json(part)
            case Sequence(elements):
                return "(" + " ".join(map(self.expression, elements)) + ")"
            case Choice(elements):
                return self._any_of(elements)
            case OneOrMore(content):
                return f"({self.expression(content)})+"
            case ZeroOrMore(content):
                return f"({self.expression(content)})*"
            case Maybe(content):
                return f"({self.expression(content)})?"
            case Tag():
                parts = [_edge(part.begin), part.content, _edge(part.end)]
                return " ".join(self.expression(one) for one in parts if one != Literal(""))
            case SeparatedTags():
                return self._tags(part)
        raise UnsupportedTagError(f"{part.__struct_config__.tag} is not supported")

    def _rule(self, body: str) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _any_of(self, parts: Iterable[CallGrammar]) -> str:
        return self._rule(" | ".join(map(self.expression, parts)))

    def _json(self, part: Schema) -> str:
        if not isinstance(part.json_schema, dict) or part.excludes:
            raise UnsupportedTagError("json_schema with more than an object is not supported")
        options, limit = self._options, part.max_whitespace_cnt
        if limit is not None and options.get("whitespace_flexible", True) and "whitespace_pattern" not in options:
            options = {**options, "whitespace_pattern": at_most(limit)}
        return self._rule(f"%json {json.dumps({'x-guidance': options, **part.json_schema}, ensure_ascii=False)}")

    def _tags(self, part: SeparatedTags) -> str:
        if not part.at_least_one or part.stop_after_first or not part.separator:
            raise UnsupportedTagError("tags_with_separator without at_least_one is not supported")
        tag = self._any_of(part.tags)
        return f"{tag} ({self.expression(Literal(part.separator))} {tag})*"


def _edge(value: str | tuple[str, ...] | Token) -> CallGrammar:
    """The beginning or end of a tag as a part of its own."""
    if isinstance(value, tuple):
        raise UnsupportedTagError("a tag with several ends is not supported")
    return Literal(value) if isinstance(value, str) else value
