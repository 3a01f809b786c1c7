"""Whether a value is a JSON Schema at all, whatever library gets it. Called when a request comes. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from quire.structured_output.capabilities import Problem, Subschema
from quire.structured_output.schema.keywords import ANNOTATIONS, COUNTS, KEYWORDS, TYPES, escaped, subschemas
from quire.structured_output.schema.references import resolves

MAX_ENUM = 10_000
MAX_NUMBER = sys.float_info.max
MAX_COUNT = float(1 << 53)
"""Of those written as decimals, such as 2.0."""


def malformed(schema: Any) -> Problem | None:
    """The first thing in `schema` that is no JSON Schema at all, such as an unknown keyword."""
    for place in subschemas(schema):
        problem = _check_form(place)
        if problem is not None:
            return problem
        if isinstance(place.schema, dict) and isinstance(place.schema.get("$ref"), str):
            reference = place.schema["$ref"]
            if reference.startswith("#") and not resolves(schema, reference):
                return Problem(f"{place.path}/$ref", f"the reference {reference[:80]!r} does not resolve")
    return None


def _check_form(place: Subschema) -> Problem | None:
    schema = place.schema
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return Problem(place.path, "a schema is an object, true or false")
    for keyword, value in schema.items():
        reason = _wrong_form(keyword, value)
        if reason is not None:
            return Problem(f"{place.path}/{escaped(keyword)}", reason)
    return None


def _wrong_form(keyword: str, value: Any) -> str | None:
    """What is wrong with a keyword and its value, whatever library gets them."""
    if keyword in ANNOTATIONS or keyword.startswith("x-"):
        return None
    if keyword not in KEYWORDS:
        return "the keyword is unknown"
    if keyword != "const" and isinstance(value, int) and abs(value) > MAX_NUMBER:
        return f"numbers beyond {MAX_NUMBER:.2g} are not supported"
    if keyword == "enum" and isinstance(value, list) and len(value) > MAX_ENUM:
        return f"more than {MAX_ENUM} values cannot be compiled in time"
    check = _FORMS.get(keyword)
    return None if check is None or check(value) else f"the value of {keyword} has the wrong type"


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer() and value < MAX_COUNT)
    return is_whole and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_types(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _is_names(value) and bool(value) and set(value) <= {*TYPES}


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "type": _is_types, "enum": _is_list, "properties": _is_map, "required": _is_names, "patternProperties": _is_map,
    **dict.fromkeys(COUNTS, _is_count), "pattern": _is_text, "format": _is_text, "minimum": _is_number,
    "maximum": _is_number, "exclusiveMinimum": _is_number, "exclusiveMaximum": _is_number,
    "multipleOf": lambda value: _is_number(value) and value > 0, "anyOf": _is_list, "oneOf": _is_list,
    "allOf": _is_list, "prefixItems": _is_list, "$ref": _is_text,
    "uniqueItems": lambda value: isinstance(value, bool),
}  # fmt: skip
