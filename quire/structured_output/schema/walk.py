"""A schema with every schema within it changed. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.structured_output.schema.keywords import LISTS, MAPS, ONES


def with_every(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of `schema` in which `change` was applied to every schema that is an object, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    return change({keyword: _changed(keyword, value, change) for keyword, value in schema.items()})


def _changed(keyword: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if keyword in MAPS and isinstance(value, dict):
        return {name: with_every(item, change) for name, item in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [with_every(item, change) for item in value]
    return with_every(value, change) if keyword in ONES else value
