"""Lengths of strings as patterns, for xgrammar, which counts control characters and halves of surrogate pairs. Pure."""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema_keywords import LISTS, MAPS, ONES

# What stands in a JSON string as it is: no quote, no backslash, no control character, no half of a surrogate pair.
PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


def with_patterns(schema: Any) -> Any:
    """`schema` with `minLength` and `maxLength` as a `pattern`; no string of it has both already."""
    if not isinstance(schema, dict):
        return schema
    changed = {keyword: _changed(keyword, value) for keyword, value in schema.items()}
    if "minLength" in changed or "maxLength" in changed:
        low, high = changed.pop("minLength", 0), changed.pop("maxLength", "")
        changed["pattern"] = f"^{PLAIN}{{{low},{high}}}$"
    return changed


def _changed(keyword: str, value: Any) -> Any:
    if keyword in MAPS and isinstance(value, dict):
        return {name: with_patterns(item) for name, item in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [with_patterns(item) for item in value]
    return with_patterns(value) if keyword in ONES else value
