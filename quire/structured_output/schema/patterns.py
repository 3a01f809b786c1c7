"""Patterns within a schema, in the form in which every library reads them alike. Pure functions."""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema.regex_normal import normal
from quire.structured_output.schema.walk import with_every


def with_normal_patterns(schema: Any) -> Any:
    """`schema`, which no library refuses, with its patterns in one form."""
    return with_every(schema, _with_normal)


def _with_normal(schema: dict[str, Any]) -> dict[str, Any]:
    changed = dict(schema)
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = normal(changed["pattern"], is_in_json=True)
    if isinstance(changed.get("patternProperties"), dict):
        found: dict[str, Any] = {}
        for pattern, item in changed["patternProperties"].items():
            one = normal(pattern, is_in_json=True)
            found[one] = {"allOf": [found[one], item]} if one in found else item
        changed["patternProperties"] = found
    return changed
