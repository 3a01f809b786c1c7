"""Grammars of calls: answers that must be calls of some tools, written in a format's own way. Pure functions.

Used by the server for forced and strict calls. What is made is a structural tag (`StructuredOutputsParams`), in whose
texts the control tokens of the vocabulary are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ValidationError
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.literals import Form, Literals, constant
from quire.parsers.xml_arguments import xml_arguments
from quire.utils.checks import shown

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NO_CALL = "[^{< \\t\\r\\n]"
"""How a text begins that is no call at the beginning of an answer."""
MAX_WHITESPACE = 1
"""Optional whitespace characters in a row in the JSON of a call: nobody reads them, and a weak model may not stop."""
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
            f"{where}.function.parameters.type is {shown(types)}; the arguments of a function are an object",
            hint='write "type": "object"', field="tools",
        )  # fmt: skip
    return {**given, "type": "object"}


def forced_calls(
    syntax: CallSyntax, calls: Sequence[CallForm], special: Mapping[str, int], *, is_one: bool
) -> dict[str, Any]:
    """A structural tag whose answers are calls and nothing else.

    Args:
        calls: functions that may be called, at least one.
        special: text -> id of the vocabulary's control tokens.
        is_one: exactly one call is written; else one or more.
    """
    literals = Literals(special)
    written = _calls(syntax, calls, literals, is_one=is_one)
    parts = [*_thinking(syntax, literals), *literals.of(syntax.begin), written, *literals.of(syntax.end)]
    return {"type": "structural_tag", "format": sequence(parts)}


def calls_among_text(
    syntax: CallSyntax, calls: Sequence[CallForm], special: Mapping[str, int], *, is_one: bool
) -> dict[str, Any]:
    """A structural tag whose answers are any text, in which whatever begins a call is one; `syntax` has openers.

    Args:
        calls, special: as in `forced_calls`.
        is_one: there is one call at most; else any number.
    """
    literals = Literals(special)
    text: Form = {"type": "any_text", "excludes": literals.excluded(syntax.openers)}
    written = _calls(syntax, calls, literals, is_one=is_one)
    block = [*literals.of(syntax.begin), written, *literals.of(syntax.end)]
    if syntax.starts_answer:
        begun = sequence([{"type": "regex", "pattern": NO_CALL}, text])
        form = {"type": "optional", "content": one_of([sequence(block), begun])}
    else:
        more = sequence([*block, text])
        form = sequence([text, {"type": "optional" if is_one else "star", "content": more}])
    return {"type": "structural_tag", "format": form}


def sequence(parts: Sequence[Form]) -> Form:
    """One after another, neighbouring texts merged."""
    merged: list[Form] = []
    for part in parts:
        if merged and merged[-1]["type"] == part["type"] == "const_string":
            merged[-1] = {"type": "const_string", "value": merged[-1]["value"] + part["value"]}
        else:
            merged.append(part)
    return merged[0] if len(merged) == 1 else {"type": "sequence", "elements": merged}


def one_of(forms: Sequence[Form]) -> Form:
    """Any of them."""
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def _thinking(syntax: CallSyntax, literals: Literals) -> list[Form]:
    if syntax.thinking is None:
        return []
    begin, end = map(literals.of, syntax.thinking)
    excluded = [part["value"] for part in end[:1] if part["type"] == "const_string"]
    text: Form = {"type": "any_text", "excludes": excluded}
    return [{"type": "optional", "content": sequence([*begin, text, *end])}]


def _calls(syntax: CallSyntax, calls: Sequence[CallForm], literals: Literals, *, is_one: bool) -> Form:
    written = [_call(syntax, call, literals) for call in calls]
    one = one_of([sequence(parts) for parts in written])
    if is_one or not syntax.has_several:
        return one
    if not syntax.separator:
        return {"type": "plus", "content": one}
    return {
        "type": "tags_with_separator",
        "tags": [_tag(parts) for parts in written],
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": False,
    }


def _call(syntax: CallSyntax, call: CallForm, literals: Literals) -> list[Form]:
    if syntax.parameters is not None:
        arguments = xml_arguments(call.schema, syntax.parameters, literals)
    else:
        arguments = [{"type": "json_schema", "json_schema": dict(call.schema), "max_whitespace_cnt": MAX_WHITESPACE}]
        if syntax.excludes:
            arguments[0]["excludes"] = list(syntax.excludes)
    parts = [
        *literals.of(syntax.head), *constant(call.name), *literals.of(syntax.middle), *arguments,
        *literals.of(syntax.tail),
    ]  # fmt: skip
    whole = sequence(parts)
    return list(whole["elements"]) if whole["type"] == "sequence" else [whole]


def _tag(parts: Sequence[Form]) -> Form:
    """A call between its first and its last part, which are texts or tokens."""
    begin, *content, end = parts if len(parts) > 2 else [piece for part in parts for piece in _halves(part)]
    return {"type": "tag", "begin": _edge(begin), "content": sequence(content), "end": _edge(end)}


def _halves(part: Form) -> list[Form]:
    if part["type"] != "const_string":
        return [part]
    return [*constant(part["value"][:1]), *constant(part["value"][1:-1]), *constant(part["value"][-1:])]


def _edge(part: Form) -> Any:
    return part["value"] if part["type"] == "const_string" else part
