"""What lm-format-enforcer honours of JSON Schema only in some places. Pure functions; loads no library.

Its parser of JSON reads a schema as it goes, takes what it does not know for absent, and writes texts of `enum`,
`const` and `properties` as they are. Where that would be wrong, a schema is refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.structured_output.capabilities import Problem, Subschema

MAX_VALUES = 256
"""Choices and enumerated values; each costs time in every step."""
REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_NAMES_A_KIND = ("type", "enum", "const", "anyOf", "$ref")
_SCALARS = ("string", "number", "integer", "boolean", "null")
# Items that the library counts once; it counts those of other kinds again when the next one begins.
_COUNTED = ("string", "number", "integer", "object")

Found = tuple[str, str] | None
"""(path below the schema, reason)."""


def check_subschema(place: Subschema, root: Any) -> Problem | None:
    """Why the library would not honour the schema at `place`, whose keywords it all knows.

    Args:
        root: the schema that references are looked up in.
    """
    if isinstance(place.schema, bool):
        is_known = place.parent == "additionalProperties"
        return (
            None if is_known else Problem(place.path, "the schemas the schemas true and false are not supported here")
        )
    found = _limit(place.schema, root)
    return None if found is None else Problem(place.path + found[0], found[1])


def _limit(schema: dict[str, Any], root: Any) -> Found:
    if not any(name in schema for name in _NAMES_A_KIND):
        return "", "a schema without type, enum, const, anyOf or $ref is not supported"
    for keyword, check in _CHECKS.items():
        if keyword in schema:
            reason = check(schema, root)
            if reason is not None:
                return f"/{keyword}", reason
    return _array_problem(schema)


def is_plain(text: Any) -> bool:
    """Whether JSON writes a text as it is, and the library, which drops spaces at the beginning, does too."""
    return isinstance(text, str) and json.dumps(text, ensure_ascii=False)[1:-1] == text == text.lstrip()


def _type(schema: dict[str, Any], root: Any) -> str | None:
    types = schema["type"]
    if not isinstance(types, list):
        return None
    if not set(types) <= set(_SCALARS):
        return "a list of types is supported only for scalar types"
    named = {"minLength", "maxLength", "pattern", "items", "properties", "enum", "const"}
    return "a list of types is supported only without other keywords" if named & set(schema) else None


def _enum(schema: dict[str, Any], root: Any) -> str | None:
    values = schema["enum"]
    if len(values) > MAX_VALUES:
        return f"more than {MAX_VALUES} values are not supported"
    if all(map(is_plain, values)):
        return None
    if all(type(value) in (int, float) and _is_plain_number(value) for value in values):
        return None
    return "only strings without JSON escapes, or only numbers without exponent, are supported"


def _is_plain_number(value: float) -> bool:
    return re.fullmatch(r"0|-?[1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+", str(value)) is not None


def _const(schema: dict[str, Any], root: Any) -> str | None:
    return None if is_plain(schema["const"]) else "only strings without JSON escapes are supported"


def _reference(schema: dict[str, Any], root: Any) -> str | None:
    found = REFERENCE.fullmatch(schema["$ref"])
    if found is None or not isinstance(root, dict) or {"$defs", "definitions"} <= set(root):
        return "only references to #/$defs/NAME or #/definitions/NAME are supported"
    return None


def _properties(schema: dict[str, Any], root: Any) -> str | None:
    if len(schema["properties"]) > MAX_VALUES:
        return f"more than {MAX_VALUES} properties are not supported"
    if any(not is_plain(name) or not name for name in schema["properties"]):
        return "a property name with JSON escapes is not supported"
    return None


def _additional(schema: dict[str, Any], root: Any) -> str | None:
    if schema["additionalProperties"] is False and "properties" not in schema:
        return "false is supported only together with properties"
    return None


def _lengths(schema: dict[str, Any], root: Any) -> str | None:
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    return "maxLength is less than minLength" if high is not None and high < low else None


def _any_of(schema: dict[str, Any], root: Any) -> str | None:
    kinds = list(_kinds(schema, root, frozenset()))
    if "cycle" in kinds:
        return "a recursive anyOf is not supported"
    if kinds.count("object") > 1 or kinds.count("array") > 1:
        return "anyOf with several objects or several arrays is not supported"
    return None


def _kinds(schema: Any, root: Any, seen: frozenset[str]) -> Iterator[str]:
    """Types of the choices in `schema`, in any depth of anyOf and $ref."""
    if not isinstance(schema, dict):
        return
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _kinds(option, root, seen)
    elif isinstance(schema.get("$ref"), str):
        found = REFERENCE.fullmatch(schema["$ref"])
        if schema["$ref"] in seen:
            yield "cycle"
        elif found is not None:
            yield from _kinds(root[found[1]][found[2]], root, seen | {schema["$ref"]})
    elif isinstance(schema.get("type"), str) and "enum" not in schema:
        yield schema["type"]


def _array_problem(schema: dict[str, Any]) -> Found:
    if schema.get("type") != "array":
        return None
    items = schema.get("items")
    if not isinstance(items, dict):
        return "/items", "an array is supported only with items"
    if schema.get("maxItems") == 0:
        return "/maxItems", "0 is not supported"
    if schema.get("minItems", 0) > 1 and ("enum" in items or items.get("type") not in _COUNTED):
        return "/minItems", f"more than 1 is supported only for items of type {', '.join(_COUNTED)}"
    return None


_CHECKS = {
    "type": _type, "enum": _enum, "const": _const, "$ref": _reference, "properties": _properties,
    "additionalProperties": _additional, "minLength": _lengths, "anyOf": _any_of,
}  # fmt: skip
