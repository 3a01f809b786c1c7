"""Structural tags of requests: read once, here, into a `CallGrammar`; and how one is written. Pure functions.

A tag is `{"type": "structural_tag", "format": {...}}`, as vLLM's (xgrammar's) are, where a format has a `type` and, by
it, further fields. The older one, `structures` and `triggers`, is read as the format `triggered_tags`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from quire.core.call_grammar import TYPES, CallGrammar, Regex, Schema, Tag, Token, TriggeredTags, parts_of, with_parts
from quire.errors import ValidationError
from quire.structured_output.schema.regex import regex_problem

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")
_PLACE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)


def read_tag(field: str, value: Any) -> CallGrammar:
    """The grammar of a structural tag.

    Raises:
        ValidationError: it is not one; the place is named.
    """
    if not isinstance(value, dict):
        raise _wrong(field, "", "it must be an object")
    if "structures" in value or "triggers" in value:
        return _of_structures(field, value)
    for name in value:
        if name not in ("type", "format"):
            raise _wrong(field, f"/{name}", "it is unknown")
    if value.get("type", "structural_tag") != "structural_tag":
        raise _wrong(field, "/type", 'it must be "structural_tag"')
    grammar: CallGrammar = _convert(field, "/format", _with_types(value.get("format")), CallGrammar)
    for path, part in parts_of(grammar, "/format"):
        reason = regex_problem(part.pattern) if isinstance(part, Regex) else None
        if reason is not None:
            raise _wrong(field, f"{path}/pattern", f"it has {reason}")
    return grammar


def tag_of(grammar: CallGrammar) -> dict[str, Any]:
    """The structural tag of a grammar, as plain data."""
    return {"type": "structural_tag", "format": msgspec.to_builtins(grammar)}


def grammar_of_text(text: str) -> CallGrammar:
    """The grammar of a tag that `tag_of` made, as JSON."""
    grammar: CallGrammar = msgspec.convert(json.loads(text)["format"], CallGrammar)
    return grammar


def schemas_of(grammar: CallGrammar, path: str = "/format") -> list[tuple[str, Any]]:
    """(path, schema) of every schema."""
    found = parts_of(grammar, path)
    return [(f"{path}/json_schema", part.json_schema) for path, part in found if isinstance(part, Schema)]


def with_schemas(grammar: CallGrammar, change: Callable[[Any], Any]) -> CallGrammar:
    """A copy in which every schema is changed."""

    def changed(part: CallGrammar) -> CallGrammar:
        if isinstance(part, Schema):
            return msgspec.structs.replace(part, json_schema=change(part.json_schema))
        return part

    return with_parts(grammar, changed)


def token_ids_of(grammar: CallGrammar) -> frozenset[int]:
    """The tokens that it names by their ids."""
    tokens = [part.token for _, part in parts_of(grammar) if isinstance(part, Token)]
    return frozenset(token for token in tokens if isinstance(token, int))


def _of_structures(field: str, value: dict[str, Any]) -> TriggeredTags:
    read: _Structures = _convert(field, "", value, _Structures)
    tags = tuple(Tag(one.begin, Schema(one.schema), one.end) for one in read.structures)
    return TriggeredTags(read.triggers, tags)


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str | Token
    schema: dict[str, Any] | bool
    end: str | tuple[str, ...] | Token


class _Structures(msgspec.Struct, forbid_unknown_fields=True, tag="structural_tag"):
    structures: Annotated[tuple[_Structure, ...], msgspec.Meta(min_length=1)]
    triggers: tuple[str, ...]


NEUTRAL = {"style": "json", "any_order": False}
"""Fields of a `json_schema` in xgrammar's form -> the values that ask for nothing else than JSON."""


def _with_types(value: Any) -> Any:
    """A format in which a tag without `type` has it, and no field of a schema that asks for nothing."""
    if isinstance(value, list):
        return [_with_types(one) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {name: one if name == "json_schema" else _with_types(one) for name, one in value.items()}
    if inner.get("type") == "json_schema":
        inner = {name: one for name, one in inner.items() if name not in NEUTRAL or one != NEUTRAL[name]}
    return {"type": "tag", **inner} if "begin" in value else inner


def _convert(field: str, path: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        assert found is not None, "it matches anything"
        reason, place = found[1], re.sub(r"[.\[\]]+", "/", found[2] or "").rstrip("/")
        unknown = _UNKNOWN_FIELD.fullmatch(reason)
        if unknown is not None:
            raise _wrong(field, f"{path}{place}/{unknown[1]}", "it is unknown") from None
        if place.endswith("/type"):
            reason = f"Expected one of {', '.join(sorted(TYPES))}"
        raise _wrong(field, path + place, reason[:1].lower() + reason[1:]) from None


def _wrong(field: str, path: str, reason: str) -> ValidationError:
    return ValidationError(f"{field} at #{path}: {reason}", hint="correct the structural tag", field=field)
