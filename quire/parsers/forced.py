"""Grammars of calls: answers that must be calls of some tools, written in a format's own way. Pure functions.

Used by the server for forced and strict calls. In the texts of the grammar the control tokens of the vocabulary are
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from quire.core.call_grammar import (
    AnyText,
    CallGrammar,
    Choice,
    Literal,
    Maybe,
    OneOrMore,
    Regex,
    Schema,
    SeparatedTags,
    Sequence,
    Tag,
    Token,
    ZeroOrMore,
)
from quire.errors import ValidationError
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.literals import Literals, literal
from quire.parsers.xml_arguments import xml_arguments
from quire.utils.checks import shown

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NO_CALL = "[^{< \\t\\r\\n]"
"""How a text begins that is no call at the beginning of an answer."""
MAX_WHITESPACE = 1
"""Optional whitespace characters in a row in the JSON of a call: a weak model may not stop writing them."""
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class CallForm:
    """A function as calls of it are written.

    Attributes:
        name: of the function.
        schema: of its arguments, an object.
    """

    name: str
    schema: Mapping[str, Any]


def arguments_schema(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without `parameters` it has none.

    Args:
        where: what errors name.

    Raises:
        ValidationError: they are no object.
    """
    given = function.get("parameters")
    if not given:
        return NO_ARGUMENTS
    types = given.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise ValidationError(
            f"{where}.function.parameters.type is {shown(types)}; the arguments of a function must be an object",
            hint='write "type": "object"', field="tools",
        )  # fmt: skip
    return {**given, "type": "object"}


def forced_calls(
    syntax: CallSyntax, calls: Several[CallForm], special: Mapping[str, int], *, is_one: bool
) -> CallGrammar:
    """Answers that are calls and nothing else.

    Args:
        calls: functions that may be called, at least one.
        special: text -> id of the vocabulary's control tokens.
        is_one: exactly one call is written; else one or more.
    """
    literals = Literals(special)
    written = _calls(syntax, calls, literals, is_one=is_one)
    return sequence([*_thinking(syntax, literals), *literals.of(syntax.begin), written, *literals.of(syntax.end)])


def calls_among_text(
    syntax: CallSyntax, calls: Several[CallForm], special: Mapping[str, int], *, is_one: bool
) -> CallGrammar:
    """Answers that are any text, in which whatever begins a call is one; `syntax` has openers.

    Args:
        calls, special: as in `forced_calls`.
        is_one: there is one call at most; else any number.
    """
    literals = Literals(special)
    text = AnyText(literals.excluded(syntax.openers))
    written = _calls(syntax, calls, literals, is_one=is_one)
    block = [*literals.of(syntax.begin), written, *literals.of(syntax.end)]
    if syntax.starts_answer:
        return Maybe(one_of([sequence(block), Sequence((Regex(NO_CALL), text))]))
    more = sequence([*block, text])
    return Sequence((text, Maybe(more) if is_one else ZeroOrMore(more)))


def sequence(parts: Several[CallGrammar]) -> CallGrammar:
    """One after another, neighbouring texts merged."""
    merged: list[CallGrammar] = []
    for part in parts:
        if merged and isinstance(merged[-1], Literal) and isinstance(part, Literal):
            merged[-1] = Literal(merged[-1].value + part.value)
        else:
            merged.append(part)
    return merged[0] if len(merged) == 1 else Sequence(tuple(merged))


def one_of(parts: Several[CallGrammar]) -> CallGrammar:
    """Any of them."""
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _thinking(syntax: CallSyntax, literals: Literals) -> list[CallGrammar]:
    if syntax.reasoning is None:
        return []
    begin, end = map(literals.of, syntax.reasoning)
    excluded = tuple(part.value for part in end[:1] if isinstance(part, Literal))
    return [Maybe(sequence([*begin, AnyText(excluded), *end]))]


def _calls(syntax: CallSyntax, calls: Several[CallForm], literals: Literals, *, is_one: bool) -> CallGrammar:
    written = [_call(syntax, call, literals) for call in calls]
    one = one_of([sequence(parts) for parts in written])
    if is_one or not syntax.has_several:
        return one
    if not syntax.separator:
        return OneOrMore(one)
    return SeparatedTags(tuple(_tag(parts) for parts in written), syntax.separator, at_least_one=True)


def _call(syntax: CallSyntax, call: CallForm, literals: Literals) -> list[CallGrammar]:
    arguments: list[CallGrammar]
    if syntax.parameters is not None:
        arguments = xml_arguments(call.schema, syntax.parameters, literals)
    else:
        arguments = [Schema(dict(call.schema), max_whitespace_cnt=MAX_WHITESPACE, excludes=syntax.excludes)]
    parts = [
        *literals.of(syntax.head), *literal(call.name), *literals.of(syntax.middle), *arguments,
        *literals.of(syntax.tail),
    ]  # fmt: skip
    whole = sequence(parts)
    return list(whole.elements) if isinstance(whole, Sequence) else [whole]


def _tag(parts: Several[CallGrammar]) -> Tag:
    """A call between its first and its last part, which are texts or tokens."""
    begin, *content, end = parts if len(parts) > 2 else [piece for part in parts for piece in _halves(part)]
    return Tag(_edge(begin), sequence(content), _edge(end))


def _halves(part: CallGrammar) -> list[CallGrammar]:
    if not isinstance(part, Literal):
        return [part]
    return [*literal(part.value[:1]), *literal(part.value[1:-1]), *literal(part.value[-1:])]


def _edge(part: CallGrammar) -> str | Token:
    assert isinstance(part, (Literal, Token)), "a call begins and ends with fixed strings"
    return part.value if isinstance(part, Literal) else part
