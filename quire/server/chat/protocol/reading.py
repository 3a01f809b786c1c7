"""From the bytes of a body to a typed request: every field is honoured, refused by name, or named in `warnings`.

Called by the routes. No state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from quire.core.sampling_checks import is_one_of
from quire.errors import UnsupportedError, ValidationError, nearest
from quire.server.chat.protocol.json_scan import JsonParts, count_parts, has_repeated_key, repeated_key
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown

Request = TypeVar("Request", bound=msgspec.Struct)

WHERE = re.compile(r" - at `\$\.?(.*)`$")
MISSING = re.compile(r"Object missing required field `(\w+)`")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_ENTRIES = 1 << 20
MAX_PARAM_CHARS = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NO_BOUNDS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class RequestFields(Generic[Request]):
    """The fields that a route knows.

    Attributes:
        request: those it honours.
        not_yet: those it knows and refuses, with the values that ask for nothing.
        no_effect: those it takes and does nothing with, said in `warnings`, even where `request` has them.
    """

    request: type[Request]
    not_yet: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()


def read_request(
    body: bytes,
    fields: RequestFields[Request],
    *,
    max_depth: int,
    max_containers: int,
    is_strict: bool,
    max_entries: int = MAX_ENTRIES,
    max_lengths: Mapping[str, int] = NO_BOUNDS,
) -> tuple[Request, Warnings]:
    """The request in `body`, with warnings of the fields that were not used.

    Args:
        max_lengths: entries that these fields may have, looked at before they are converted.

    Raises:
        ValidationError: not JSON, too many or too deep parts, a key twice, a value of the wrong type; strict: an unused
            field.
        UnsupportedError: a known field that is not supported yet.
    """
    values = read_object(body, max_depth, max_containers, max_entries)
    known = fields.request.__struct_fields__
    for name in fields.not_yet:
        if name in values and name not in known:
            _refuse_not_yet(name, values[name], fields.not_yet)
    warnings = Warnings(is_strict=is_strict)
    for name in values:
        if (name in known and name not in fields.no_effect) or (warning := _unused(name, values[name], fields)) is None:
            continue
        warnings.add(_param(name), warning, f"leave out {shown(name)}")
        if warnings.are_full:
            break
    for name, length in max_lengths.items():
        _check_length(name, values.get(name), length)
    try:
        request = msgspec.convert(values, fields.request)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    _warn_of_inner(values, request, warnings)
    return request, warnings


def _warn_of_inner(values: Mapping[str, Any], request: msgspec.Struct, warnings: Warnings) -> None:
    """Name the unknown fields of objects that are fields, where they do not refuse them themselves."""
    for name in request.__struct_fields__:
        read = getattr(request, name)
        for inner in values[name] if isinstance(read, msgspec.Struct) and not warnings.are_full else ():
            if inner not in read.__struct_fields__:
                warnings.add(f"{name}.{_param(inner)}", f"unknown field {shown(inner)} of {name} is ignored")


def read_object(body: bytes, max_depth: int, max_containers: int, max_entries: int = MAX_ENTRIES) -> dict[str, Any]:
    """The JSON object in `body`; a byte order mark before it is left out.

    Args:
        max_containers: lists and objects together, and members of objects.
        max_entries: of all lists and objects.

    Raises:
        ValidationError: it is something else, nested deeper than `max_depth`, has too many parts, or a key twice.
    """
    body = body.removeprefix(BYTE_ORDER_MARK)
    if len(body) > min(max_containers, max_entries):
        _check_parts(body, JsonParts(max_containers, max_containers, max_entries))
    try:
        values = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise ValidationError("the body is not UTF-8", hint="encode the JSON as UTF-8") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except msgspec.DecodeError as error:
        if SURROGATE.search(body):
            told = f"the body is not JSON: {error}; or an escape (\\ud800 to \\udfff) is half of a surrogate pair"
            raise ValidationError(told, hint="escape characters whole, or send them as UTF-8") from None
        raise ValidationError(f"the body is not JSON: {error}", hint="send one JSON object") from None
    if not isinstance(values, dict):
        raise ValidationError("the body must be one JSON object", hint='send {"name": value, ...}')
    if body.count(b"{") + body.count(b"[") > max_depth:
        _check_depth(values, max_depth)
    if has_repeated_key(body, values) and (key := repeated_key(body)) is not None:
        raise ValidationError(
            f"duplicate key {shown(key)} in an object of the body", hint="send each key once",
            field=_param(key) if key in values else None,
        )  # fmt: skip
    return values


def _check_parts(body: bytes, most: JsonParts) -> None:
    """Refuse a body of too many parts before they are made."""
    found = count_parts(body, most)
    for num_parts, limit, kind, setting in (
        (found.num_containers, most.num_containers, "lists and objects", "max_json_containers"),
        (found.num_members, most.num_members, "members of objects", "max_json_containers"),
        (found.num_commas, most.num_commas, "entries", "max_json_entries"),
    ):
        if num_parts > limit:
            raise ValidationError(
                f"the body has more than {limit} {kind}", hint=f"split it into several requests ({setting})"
            )


def _check_length(name: str, value: Any, limit: int) -> None:
    if isinstance(value, (list, dict)) and len(value) > limit:
        raise ValidationError(f"{name} has {len(value)} entries, at most {limit} are allowed", field=name)


def _param(name: str) -> str:
    """The name of a field, for an error."""
    return name if len(name) <= MAX_PARAM_CHARS else f"{name[:MAX_PARAM_CHARS]}..."


def _check_depth(value: Any, max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for one in level:
            items = one.values() if isinstance(one, dict) else one
            inner += [item for item in items if type(item) is dict or type(item) is list]
        if not inner:
            return
        level = inner
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> ValidationError:
    return ValidationError(f"the body is nested more than {max_depth} levels deep", hint="flatten it")


def _refuse_not_yet(name: str, value: Any, not_yet: Mapping[str, tuple[Any, ...]]) -> None:
    if name in not_yet and value is not None and not is_one_of(value, not_yet[name]):
        raise UnsupportedError(
            f"{name} is valid for vLLM, but Quire does not implement it yet (got {shown(value)})",
            hint=f"leave out {name}",
            field=name,
        )


def _unused(name: str, value: Any, fields: RequestFields[Any]) -> str | None:
    """What to say about a field that is not used; None when it asked for nothing."""
    if name in fields.not_yet:
        return None
    if name in fields.no_effect:
        return None if value is None else f"{name} has no effect"
    close = nearest(name[:100], fields.request.__struct_fields__)
    hint = f"; did you mean {close}?" if close else ""
    return f"unknown field {shown(name)} is ignored{hint}"


def _type_error(text: str) -> ValidationError:
    """The error of msgspec as ours: "Expected `int`, got `str` - at `$.max_tokens`" names its field."""
    missing = MISSING.fullmatch(text)
    if missing is not None:
        return ValidationError(f"{missing[1]} is missing", hint=f"send {missing[1]}", field=missing[1])
    found = WHERE.search(text)
    where = found[1] if found else ""
    reason = text[: found.start()] if found else text
    reason = reason[0].lower() + reason[1:]
    name = re.split(r"[.\[]", where)[0] or None
    message = f"{where}: {reason}" if where else f"the request is malformed: {reason}"
    return ValidationError(message, field=name)
