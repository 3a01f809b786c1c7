"""Objects inside a request (blocks, tools, settings), read one by one: each error names its place, and what is not used
is noted.

Called by the other modules of this package. No state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from quire.errors import ValidationError, nearest
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown, wrong_type

Part = TypeVar("Part", bound=msgspec.Struct)


def read_part(
    where: str, value: Any, kind: type[Part], warnings: Warnings, no_effect: Mapping[str, Collection[Any]] | None = None
) -> Part:
    """`value` as a `kind`; its "type" is the caller's to look at.

    Args:
        where: its place, as in "messages[0].content[1]".
        no_effect: fields that are taken and not used, each with the values that ask for nothing; null never does.

    Raises:
        ValidationError: it is no object, or a field is missing or of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise wrong_type(where, value, "an object")
    known, unused = kind.__struct_fields__, no_effect or {}
    for name, given in value.items():
        if name in known or name == "type" or warnings.are_full:
            continue
        if name not in unused:
            close = nearest(name, [*known, *unused])
            hint = f"; did you mean {close}?" if close else ""
            warnings.add(where, f"{where}: unknown field {shown(name)} is ignored{hint}")
        elif given is not None and given not in unused[name]:
            warnings.add(name, f"{name} has no effect")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        place = f"{where}{place.rstrip('`')}"
        raise ValidationError(f"{place}: {reason[0].lower()}{reason[1:]}", field=place) from None


def kind_of(where: str, value: Any, kinds: Collection[str], hint: str) -> str:
    """The `type` of an object, one of `kinds`.

    Raises:
        ValidationError: it is another, or there is none.
    """
    if not isinstance(value, Mapping):
        raise wrong_type(where, value, "an object with a type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValidationError(f"{where}.type={shown(kind)} is not supported", hint=hint, field=where)
    return kind
