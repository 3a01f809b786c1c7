"""The keywords of JSON Schema, by what they are about, and the schemas within a schema. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.structured_output.capabilities import Subschema

ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated", "readOnly",
    "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "$defs",
    "definitions",
))  # fmt: skip
# Keywords by the type of value they are about.
BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset((
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    )),
    "array": frozenset((
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains",
    )),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
}  # fmt: skip
WHOLE = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref"))
REFERENCES = frozenset(("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"))
KEYWORDS = WHOLE | REFERENCES | frozenset().union(*BY_TYPE.values())
COUNTS = frozenset(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"))
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = frozenset((
    "date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration",
))  # fmt: skip
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))
ONES = frozenset((
    "items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "contains", "not",
    "if", "then", "else", "propertyNames",
))  # fmt: skip


def subschemas(schema: Any) -> Iterator[Subschema]:
    """Every schema in `schema`, outer ones first."""
    stack = [Subschema(schema, "")]
    while stack:
        place = stack.pop()
        yield place
        if isinstance(place.schema, dict):
            stack.extend(reversed(list(_children(place))))


def _children(place: Subschema) -> Iterator[Subschema]:
    for keyword, value in place.schema.items():
        if keyword in MAPS and isinstance(value, dict):
            path = f"{place.path}/{keyword}/"
            for name, item in value.items():
                if not isinstance(item, list):  # a list of names in "dependencies"
                    yield Subschema(item, path + escaped(name), keyword)
        elif keyword in LISTS and isinstance(value, list):
            path = f"{place.path}/{keyword}/"
            for index, item in enumerate(value):
                yield Subschema(item, f"{path}{index}", keyword)
        elif keyword in ONES and not isinstance(value, list):
            yield Subschema(value, f"{place.path}/{keyword}", keyword)


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types that are meant."""
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)
