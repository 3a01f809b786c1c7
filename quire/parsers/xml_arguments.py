"""Arguments that are marked one by one, nothing quoted: <parameter=key>value</parameter>, as a grammar's parts.

Used for the formats of `marked_calls`, whose parsers make JSON of the texts by the types of the schema. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.core.call_grammar import AnyText, CallGrammar, Choice, Literal, Maybe, Regex, Schema, Sequence
from quire.parsers.call_syntax import ParameterMarks
from quire.parsers.literals import Literals, literal
from quire.parsers.tools import types_of_schema

DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly")
)
ROOT_KEYS = ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    "$id",
    "strict",
    *DEFINITIONS,
}
TEXT_KEYS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}
MAX_LENGTH = 4096
# What a text of limited length is made of: no "<", which could end it, and nothing that counts as several characters.
PLAIN = "[\\t\\n -;=-\ud7ff\ue000-\U0010ffff]"


def xml_problem(schema: Mapping[str, Any], marks: ParameterMarks) -> str | None:
    """The path and the keyword that cannot be honoured in this format; None = all of it can."""
    for key in schema:
        if key not in ROOT_KEYS:
            return f"/{key}"
    properties = schema.get("properties") or {}
    missing = [name for name in schema.get("required") or () if name not in properties]
    if missing:
        return f"/required ({missing[0]} is not a property)"
    for name, given in properties.items():
        if _name_problem(name):
            return f"/properties/{name} (its name)"
        problem = _text_problem(given, marks) if _is_text(given) else None
        if problem is not None:
            return f"/properties/{name}/{problem}"
    return None


def xml_arguments(schema: Mapping[str, Any], marks: ParameterMarks, literals: Literals) -> list[CallGrammar]:
    """The parts of all parameters, in the order of the schema; what it does not require may be left out.

    Args:
        marks: of the format.
        literals: makes parts of the marks' texts.
    """
    required = set(schema.get("required") or ())
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    parts: list[CallGrammar] = []
    for name, given in (schema.get("properties") or {}).items():
        is_json = marks.json_middle is not None and not _is_text(given)
        middle = marks.json_middle if is_json and marks.json_middle is not None else marks.middle
        value = _value(given, shared, marks, literals.excluded(marks.excludes))
        elements = [*literals.of(marks.head), *literal(name), *literals.of(middle), value, *literals.of(marks.tail)]
        whole = Sequence(tuple(elements))
        parts.append(whole if name in required else Maybe(whole))
    return parts


def _is_text(schema: Any) -> bool:
    """Whether the parser takes what is written for a text (or, where that may be, null)."""
    if not isinstance(schema, Mapping):
        return True
    return "string" in types_of_schema(schema)


def _text_problem(schema: Any, marks: ParameterMarks) -> str | None:
    if not isinstance(schema, Mapping):
        return "false" if schema is False else None
    keyword = next((one for one in ("anyOf", "oneOf") if one in schema), None)
    if keyword is not None:
        texts = [one for one in _alternatives(schema, marks) if _is_text(one)]
        is_simple = set(schema) <= ANNOTATIONS | {keyword} and (keyword == "anyOf" or len(texts) == 1)
        return None if is_simple and texts and not any(_text_problem(one, marks) for one in texts) else keyword
    for key in schema:
        if key not in TEXT_KEYS:
            return str(key)
    if max(schema.get("minLength") or 0, schema.get("maxLength") or 0) > MAX_LENGTH:
        return "maxLength"
    if ("enum" in schema or "const" in schema) and not _choices(schema, marks):
        return "enum"
    return None


def _alternatives(schema: Mapping[str, Any], marks: ParameterMarks) -> list[Any]:
    """Those that a text satisfies, or null where the marks do not say which of them a value is."""
    found = schema.get("anyOf") or schema.get("oneOf") or []
    has_null = marks.json_middle is None
    return [one for one in found if _is_text(one) or (has_null and types_of_schema(one) == {"null"})]


def _choices(schema: Mapping[str, Any], marks: ParameterMarks) -> list[str]:
    """The texts that the schema names and that can be written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    values = ["null" if value is None and marks.json_middle is None else value for value in values]
    texts = [value for value in values if isinstance(value, str) and value]
    return [value for value in texts if not any(one in value for one in marks.excludes)]


def _value(schema: Any, shared: Mapping[str, Any], marks: ParameterMarks, excluded: tuple[str, ...]) -> CallGrammar:
    if not _is_text(schema):
        return Schema({**shared, **schema}, max_whitespace_cnt=1, excludes=excluded)
    if isinstance(schema, Mapping) and ("anyOf" in schema or "oneOf" in schema):
        parts = [
            _value(one, shared, marks, excluded) if _is_text(one) else Literal("null")
            for one in _alternatives(schema, marks)
        ]
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))
    if isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
        choices = [Literal(value) for value in _choices(schema, marks)]
        return choices[0] if len(choices) == 1 else Choice(tuple(choices))
    if isinstance(schema, Mapping) and ("minLength" in schema or "maxLength" in schema):
        low, high = schema.get("minLength") or 0, schema.get("maxLength")
        return Regex(f"{PLAIN}{{{low},{'' if high is None else high}}}")
    return AnyText(excluded)


def without_problems(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The names and types alone of a schema that cannot be honoured."""
    given = schema.get("properties")
    given = {name: one for name, one in given.items() if not _name_problem(name)} if isinstance(given, Mapping) else {}
    properties = {name: {"type": "string"} if _is_text(one) else _types_alone(one) for name, one in given.items()}
    names = schema.get("required")
    required = [name for name in names if name in properties] if isinstance(names, list) else []
    return {"type": "object", "properties": properties, "required": required}


def _types_alone(schema: Mapping[str, Any]) -> dict[str, Any]:
    types = sorted(types_of_schema(schema))
    return {"type": types} if types else {}


def _name_problem(name: str) -> bool:
    return not name or not set(name).isdisjoint("<>\n\"' =")
