"""Lengths and some formats of strings as patterns. Pure functions.

xgrammar counts control characters and halves of surrogate pairs, and some let labels of host names have any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.structured_output.schema_keywords import LISTS, MAPS, ONES

# What stands in a JSON string as it is: no quote, no backslash, no control character, no half of a surrogate pair.
PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9_+\\-]{1,20}"
# At most 191 characters, and at most 62 before the @.
FORMATS = {
    "hostname": f"^{_LABEL}(\\.{_LABEL}){{0,2}}$",
    "email": f"^{_ATOM}(\\.{_ATOM}){{0,2}}@{_LABEL}(\\.{_LABEL}){{1,2}}$",
}


def with_patterns(schema: Any) -> Any:
    """`schema` with `minLength`, `maxLength` and some formats as a `pattern`; no string of it has both already."""
    if not isinstance(schema, dict):
        return schema
    changed = {keyword: _changed(keyword, value, with_patterns) for keyword, value in schema.items()}
    if "minLength" in changed or "maxLength" in changed:
        low, high = changed.pop("minLength", 0), changed.pop("maxLength", "")
        changed["pattern"] = f"^{PLAIN}{{{low},{high}}}$"
    if isinstance(changed.get("format"), str) and changed["format"] in FORMATS:
        changed["pattern"] = FORMATS[changed.pop("format")]
    return changed


def with_format_patterns(schema: Any) -> Any:
    """`schema` with these formats as a `pattern`, for llguidance, which honours several patterns of one string."""
    if not isinstance(schema, dict):
        return schema
    changed = {keyword: _changed(keyword, value, with_format_patterns) for keyword, value in schema.items()}
    if isinstance(changed.get("format"), str) and changed["format"] in FORMATS:
        changed["allOf"] = [*changed.get("allOf", ()), {"pattern": FORMATS[changed.pop("format")]}]
    return changed


def _changed(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if keyword in MAPS and isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [change(item) for item in value]
    return change(value) if keyword in ONES else value
