"""From the bytes of a body to a typed request: every field is honoured, refused by name, or named in `warnings`.

Called by the routes. No state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from quire.core.sampling_checks import is_one_of
from quire.errors import UnsupportedError, ValidationError, nearest
from quire.utils.checks import shown

Request = TypeVar("Request", bound=msgspec.Struct)

WHERE = re.compile(r" - at `\$\.?(.*)`$")
MAX_WARNINGS = 32


@dataclass(frozen=True, slots=True)
class RequestFields(Generic[Request]):
    """The fields that a route knows.

    Attributes:
        request: those it honours.
        not_yet: those it knows and refuses, with the values that ask for nothing.
        no_effect: those it takes and does nothing with, said in `warnings`.
    """

    request: type[Request]
    not_yet: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()


def read_request(
    body: bytes, fields: RequestFields[Request], *, max_depth: int, max_containers: int, is_strict: bool
) -> tuple[Request, list[str]]:
    """The request in `body`, and what there is to say about fields that were not used.

    Raises:
        ValidationError: not JSON, too many or too deep parts, a value of the wrong type; strict: an unused field.
        UnsupportedError: a known field that is not supported yet.
    """
    values = read_object(body, max_depth, max_containers)
    known = fields.request.__struct_fields__
    warnings: list[str] = []
    for name in [name for name in values if name not in known]:
        _refuse_not_yet(name, values[name], fields.not_yet)
        if len(warnings) == MAX_WARNINGS:
            continue
        warning = _unused(name, values[name], fields)
        if warning is not None:
            if is_strict:
                raise ValidationError(warning, hint=f"leave out {shown(name)}", field=name)
            warnings.append(warning)
    try:
        request = msgspec.convert(values, fields.request)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    return request, warnings


def read_object(body: bytes, max_depth: int, max_containers: int) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ValidationError: it is something else, nested deeper than `max_depth`, or has too many lists and objects.
    """
    num_brackets = body.count(b"{") + body.count(b"[")
    if num_brackets > max_containers and _num_containers(body) > max_containers:  # before they are made
        raise ValidationError(
            f"the body has more than {max_containers} lists and objects", hint="split it into several requests"
        )
    try:
        values = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise ValidationError("the body is not UTF-8", hint="encode the JSON as UTF-8") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except msgspec.DecodeError as error:
        raise ValidationError(f"the body is not JSON: {error}", hint="send one JSON object") from None
    if not isinstance(values, dict):
        raise ValidationError("the body must be one JSON object", hint='send {"name": value, ...}')
    if num_brackets > max_depth:
        _check_depth(values, max_depth)
    return values


def _num_containers(body: bytes) -> int:
    """Brackets outside of texts."""
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    is_inside = np.logical_xor.accumulate(plain == ord('"'))
    return int(np.count_nonzero(((plain == ord("{")) | (plain == ord("["))) & ~is_inside))


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
    return ValidationError(f"the body is nested deeper than {max_depth} levels", hint="flatten it")


def _refuse_not_yet(name: str, value: Any, not_yet: Mapping[str, tuple[Any, ...]]) -> None:
    if name in not_yet and value is not None and not is_one_of(value, not_yet[name]):
        raise UnsupportedError(
            f"{name} is known but not supported yet (got {shown(value)})", hint=f"leave out {name}", field=name
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
    found = WHERE.search(text)
    where = found[1] if found else ""
    reason = text[: found.start()] if found else text
    reason = reason[0].lower() + reason[1:]
    name = re.split(r"[.\[]", where)[0] or None
    message = f"{where}: {reason}" if where else f"the request is malformed: {reason}"
    return ValidationError(message, field=name)
