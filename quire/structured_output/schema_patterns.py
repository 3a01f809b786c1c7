"""Patterns within a schema, in the form in which every library reads them alike. Pure functions."""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema_keywords import LISTS, MAPS, ONES
from quire.structured_output.schema_regex import with_ascii_classes


def with_ascii_patterns(schema: Any) -> Any:
    """`schema`, which no library refuses, with the classes of its patterns ASCII."""
    if not isinstance(schema, dict):
        return schema
    return {keyword: _changed(keyword, value) for keyword, value in schema.items()}


def _changed(keyword: str, value: Any) -> Any:
    if keyword == "pattern" and isinstance(value, str):
        return with_ascii_classes(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return {with_ascii_classes(pattern): with_ascii_patterns(item) for pattern, item in value.items()}
    if keyword in MAPS and isinstance(value, dict):
        return {name: with_ascii_patterns(item) for name, item in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [with_ascii_patterns(item) for item in value]
    return with_ascii_patterns(value) if keyword in ONES else value
