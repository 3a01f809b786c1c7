"""Objects whose schema names properties, and says nothing of others, get no others. Pure functions.

The grammar libraries then write the same objects, and a model cannot go on inventing names. A schema that does not say
that its value is an object is left as it is.
"""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema.keywords import LISTS, MAPS, ONES

_SAYS = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))


def with_closed_objects(schema: Any, *, always: bool = False) -> Any:
    """`schema` with such objects closed.

    Args:
        always: where schemas are combined (allOf), too, which may leave nothing that satisfies them all.
    """
    return _closed(schema) if always or not _combines(schema) else schema


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = {keyword: _closed_value(keyword, value) for keyword, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema and not _SAYS & set(schema):
        changed["additionalProperties"] = False
    return changed


def _closed_value(keyword: str, value: Any) -> Any:
    if keyword in MAPS and isinstance(value, dict):
        return {name: _closed(item) for name, item in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [_closed(item) for item in value]
    return _closed(value) if keyword in ONES else value


def _combines(schema: Any) -> bool:
    """Whether there is an allOf, or properties beside a choice of schemas, anywhere in it."""
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or ("properties" in schema and schema.keys() & {"anyOf", "oneOf", "$ref"}):
        return True
    for keyword, value in schema.items():
        children: list[Any] = []
        if keyword in MAPS and isinstance(value, dict):
            children = list(value.values())
        elif keyword in LISTS and isinstance(value, list):
            children = value
        elif keyword in ONES:
            children = [value]
        if any(_combines(child) for child in children):
            return True
    return False
