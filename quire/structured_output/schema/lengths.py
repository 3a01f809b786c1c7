"""Lengths and some formats of strings as patterns, and further items of a list, as each library needs them said.

xgrammar counts control characters and halves of surrogate pairs, and ends lists and objects behind what is said of
them. Pure functions.
"""

from __future__ import annotations

from typing import Any

from quire.structured_output.schema.formats import FORMATS, FORMATS_IN_FULL
from quire.structured_output.schema.keywords import BY_TYPE
from quire.structured_output.schema.walk import with_every

# What stands in a JSON string as it is: no quote, no backslash, no control character, no half of a surrogate pair.
PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
_NAMES = BY_TYPE["object"] - {"minProperties", "maxProperties"}


def with_patterns(schema: Any) -> Any:
    """`schema` with `minLength`, `maxLength` and some formats as a `pattern`; no string of it has both already."""
    return with_every(schema, _with_pattern)


def with_format_patterns(schema: Any) -> Any:
    """`schema` with these formats as a `pattern`, for llguidance, which honours several patterns of one string."""
    return with_every(schema, _with_format_pattern)


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    changed = dict(schema)
    if "minLength" in changed or "maxLength" in changed:
        low, high = changed.pop("minLength", 0), changed.pop("maxLength", "")
        changed["pattern"] = f"^{PLAIN}{{{low},{high}}}$"
    if isinstance(changed.get("format"), str) and changed["format"] in FORMATS:
        changed["pattern"] = FORMATS[changed.pop("format")]
    types = changed.get("type", [])
    if ("array" in types or "prefixItems" in changed) and not {"items", "unevaluatedItems"} & set(changed):
        changed["items"] = True
    if "object" in types and not _NAMES & set(changed):
        changed["additionalProperties"] = True
    return changed


def _with_format_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(schema.get("format"), str) or schema["format"] not in FORMATS_IN_FULL:
        return schema
    changed = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    changed["allOf"] = [*changed.get("allOf", ()), {"pattern": FORMATS_IN_FULL[schema["format"]]}]
    return changed
