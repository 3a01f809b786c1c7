"""Structural tags: free text in which some parts follow schemas. Read once, here, into one form. Pure functions.

The form is xgrammar's: `{"type": "structural_tag", "format": {...}}`, where a format has a `type` and, by it, further
fields. The older one, `structures` and `triggers`, is written as the format `triggered_tags`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.errors import ValidationError
from quire.structured_output.schema.regex import regex_problem

_TAGS = {"tags", "at_least_one", "stop_after_first"}
# Type of a format -> its fields. What is not here would be ignored.
FIELDS: dict[str, frozenset[str]] = {
    kind: frozenset(fields)
    for kind, fields in {
        "const_string": {"value"},
        "json_schema": {"json_schema", "max_whitespace_cnt", "excludes"},
        "any_text": {"excludes", "max_tokens", "max_chars"},
        "grammar": {"grammar"},
        "regex": {"pattern"},
        "sequence": {"elements"},
        "or": {"elements"},
        "tag": {"begin", "content", "end"},
        "triggered_tags": {"triggers", "excludes"} | _TAGS,
        "tags_with_separator": {"separator"} | _TAGS,
        "token_triggered_tags": {"trigger_tokens", "exclude_tokens"} | _TAGS,
        "optional": {"content"},
        "plus": {"content"},
        "star": {"content"},
        "repeat": {"min", "max", "content"},
        "dispatch": {"rules", "loop", "excludes"},
        "token_dispatch": {"rules", "loop", "exclude_tokens"},
        "token": {"token"},
        "exclude_token": {"exclude_tokens"},
        "any_tokens": {"exclude_tokens", "max_tokens"},
    }.items()
}


def read_tag(field: str, value: Any) -> dict[str, Any]:
    """A tag in the one form.

    Raises:
        ValidationError: it is none; the place is named.
    """
    if not isinstance(value, dict):
        raise _wrong(field, "", "is no object")
    if "structures" in value or "triggers" in value:
        value = _of_structures(field, value)
    for name in value:
        if name not in ("type", "format"):
            raise _wrong(field, f"/{name}", "is unknown")
    if value.get("type", "structural_tag") != "structural_tag":
        raise _wrong(field, "/type", 'must be "structural_tag"')
    for path, one in _formats(value.get("format"), "/format"):
        _check(field, path, one)
    return {"type": "structural_tag", "format": value["format"]}


def _formats(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every format within `value`, outer ones first, with its path."""
    yield path, value
    if not isinstance(value, dict):
        return
    if "content" in value:
        yield from _formats(value["content"], f"{path}/content")
    for name in ("elements", "tags"):
        for index, one in enumerate(value[name] if isinstance(value.get(name), list) else ()):
            yield from _formats(one, f"{path}/{name}/{index}")
    for index, rule in enumerate(value["rules"] if isinstance(value.get("rules"), list) else ()):
        if isinstance(rule, list) and len(rule) == 2:
            yield from _formats(rule[1], f"{path}/rules/{index}/1")


def _of_structures(field: str, value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name not in ("type", "structures", "triggers"):
            raise _wrong(field, f"/{name}", "is unknown")
    structures, tags = value.get("structures"), []
    if not isinstance(structures, list) or not isinstance(value.get("triggers"), list):
        raise _wrong(field, "", "needs two lists, structures and triggers")
    for index, one in enumerate(structures):
        path = f"/structures/{index}"
        if not isinstance(one, dict) or set(one) != {"begin", "schema", "end"}:
            raise _wrong(field, path, "must be an object of begin, schema and end")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"format": {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}}


def _check(field: str, path: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong(field, path, "must be an object")
    kind = value.get("type", "tag" if "begin" in value else None)
    if kind not in FIELDS:
        raise _wrong(field, f"{path}/type", f"must be one of {', '.join(FIELDS)}")
    for name in value:
        if name != "type" and name not in FIELDS[kind]:
            raise _wrong(field, f"{path}/{name}", f"is unknown in {kind}")
    if kind == "json_schema" and not isinstance(value.get("json_schema"), (dict, bool)):
        raise _wrong(field, f"{path}/json_schema", "must be a schema")
    limit = value.get("max_whitespace_cnt")
    if kind == "json_schema" and limit is not None and (type(limit) is not int or limit < 1):
        raise _wrong(field, f"{path}/max_whitespace_cnt", "must be a whole number from 1 on")
    if kind == "regex":
        pattern = value.get("pattern")
        reason = regex_problem(pattern) if isinstance(pattern, str) else "no pattern"
        if reason is not None:
            raise _wrong(field, f"{path}/pattern", f"has {reason}")
    for name in ("elements", "tags", "rules"):
        if name in FIELDS[kind] and (not isinstance(value.get(name), list) or not value[name]):
            raise _wrong(field, f"{path}/{name}", "must be a list that is not empty")
    if kind in ("dispatch", "token_dispatch") and any(
        not isinstance(rule, list) or len(rule) != 2 for rule in value["rules"]
    ):
        raise _wrong(field, f"{path}/rules", "must be pairs of a pattern and a format")


def _wrong(field: str, path: str, reason: str) -> ValidationError:
    return ValidationError(f"{field} at #{path}: it {reason}", hint="correct the structural tag", field=field)
