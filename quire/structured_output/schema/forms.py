"""A schema in fewer forms: what forbids nothing is left out, and some keywords are said by others. Pure functions.

No library sees what is left out here, and none has to know it.
"""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema.keywords import COUNTS
from quire.structured_output.schema.walk import with_every


def simplified(schema: Any) -> Any:
    """A schema of right form that forbids the same."""
    return with_every(schema, _simplified)


def with_types(schema: Any) -> Any:
    """`schema` with the type that `properties`, `items` and `prefixItems` are about, where it names none.

    It forbids more than `schema`, which of values of other types says nothing.
    """
    return with_every(schema, _typed)


def _simplified(schema: dict[str, Any]) -> dict[str, Any]:
    changed = {keyword: int(value) if keyword in COUNTS else value for keyword, value in schema.items()}
    if changed.get("uniqueItems") is False:
        del changed["uniqueItems"]
    names = changed.get("propertyNames")
    if _is_anything(names) or names == {"type": "string"}:  # as every name is
        del changed["propertyNames"]
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if changed.get(keyword) is True:
            del changed[keyword]
    if _is_anything(changed.get("contains")) and not {"minContains", "maxContains"} & set(changed):
        del changed["contains"]
        changed["minItems"] = max(1, changed.get("minItems", 0))
    return changed


def _is_anything(schema: Any) -> bool:
    return schema is True or schema == {}


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    if {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"} & set(schema):
        return schema
    if "properties" in schema:
        return {"type": "object", **schema}
    return {"type": "array", **schema} if {"items", "prefixItems"} & set(schema) else schema
