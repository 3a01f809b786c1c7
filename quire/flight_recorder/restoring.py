"""Puts a recorded state (`snapshot`) into a scheduler that was made anew from the same setup. Called by replays.

A recording may come from anywhere: it holds values, and names of classes out of a closed list (`state_classes`). What
names anything else, is too large or nested too deeply is a `MessageError`, and nothing of it is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.errors import MessageError
from quire.flight_recorder.columns import unpack_column
from quire.flight_recorder.snapshot import MAX_STATE_BYTES, Node
from quire.flight_recorder.state_classes import ENUM_BY_NAME, OBJECT_BY_NAME, STRUCT_BY_NAME, slots_of

DTYPE = re.compile(r"[<>|][biuf][1248]")
FORMS = frozenset((
    "kept", "again", "enum", "number", "tuple", "column", "list", "deque", "set", "frozenset", "dict", "count", "array",
    "rows", "struct", "object",
))  # fmt: skip

T = TypeVar("T")


def restore(root: Any, data: bytes) -> None:
    """Bring `root`, made anew from the same setup, into a state.

    Raises:
        MessageError: the bytes are not a state of such an object.
    """
    try:
        _Restorer().value(msgspec.msgpack.decode(_inflated(data)), root)
    except RecursionError:
        raise MessageError("the recorded state cannot be restored: it is nested too deeply") from None
    except (zlib.error, msgspec.DecodeError, MemoryError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise MessageError(f"the recorded state cannot be restored: {error}") from None


def _inflated(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    state = stream.decompress(data, MAX_STATE_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_STATE_BYTES} bytes")
    return state


def _listed(name: str, listed: Mapping[str, T]) -> T:
    if name not in listed:
        raise ValueError(f"{name!r} is not an allowed class")
    return listed[name]


def _dtype(name: str) -> np.dtype[Any]:
    if not DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not an allowed array type")
    return np.dtype(name)


def _check_field(kind: type, name: str) -> None:
    """Refuse what is not data of an object of `kind`: its methods, properties and special attributes."""
    found = getattr(kind, name, None)
    is_slot = isinstance(found, types.MemberDescriptorType)
    if name.startswith("__") or not name.isidentifier() or not (is_slot or name in slots_of(kind) or _has_dict(kind)):
        raise ValueError(f"{name!r} is not a field of a {kind.__name__}")
    if not is_slot and (callable(found) or isinstance(found, property)):
        raise ValueError(f"{name!r} of a {kind.__name__} is not data")


def _has_dict(kind: type) -> bool:
    return bool(getattr(kind, "__dictoffset__", 0))


class _Restorer:
    """Rebuilds values; `old` is what the new scheduler has in the same place, which is filled where it can be."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._filled_ids: set[int] = set()

    def _claims(self, old: Any) -> bool:
        """Whether `old` may be filled: nothing else has been restored into it."""
        is_first = id(old) not in self._filled_ids
        self._filled_ids.add(id(old))
        return is_first

    def value(self, node: Node, old: Any) -> Any:
        if not isinstance(node, list):
            return node
        form, *rest = node
        if form not in FORMS:
            raise ValueError(f"{form!r} is not a valid encoding")
        made: Any = getattr(self, f"_{form}")(*rest, old=old)
        return made

    def _kept(self, *, old: Any) -> Any:
        if old is None:
            raise ValueError("a function that the new scheduler does not have")
        return old

    def _again(self, number: int, *, old: Any) -> Any:
        return self._made[number]

    def _enum(self, kind: str, value: Any, *, old: Any) -> Any:
        return _listed(kind, ENUM_BY_NAME)(value)

    def _number(self, dtype: str, data: bytes, *, old: Any) -> Any:
        return np.frombuffer(data, _dtype(dtype))[0]

    def _tuple(self, items: list[Node], *, old: Any) -> tuple[Any, ...]:
        return tuple(self.value(one, _at(old, i)) for i, one in enumerate(items))

    def _column(self, form: str, number: int, packed: Any, maxlen: int | None = None, *, old: Any) -> Any:
        items = unpack_column(packed)
        if form == "tuple":
            return tuple(items)
        made = self._filled(form, old, maxlen)
        if form == "frozenset":
            made = frozenset(items)
        elif form == "set":
            made.update(items)
        else:
            made.extend(items)
        self._made[number] = made
        return made

    def _filled(self, form: str, old: Any, maxlen: int | None = None) -> Any:
        """An empty container: the old one where there is one of the kind."""
        kind: Any = {"list": list, "set": set, "frozenset": frozenset, "deque": deque, "dict": dict}[form]
        if type(old) is kind and form != "frozenset" and self._claims(old):
            old.clear()
            return old
        return deque(maxlen=maxlen) if form == "deque" else kind()

    def _list(self, number: int, items: list[Node], *, old: Any) -> list[Any]:
        before = list(old) if type(old) is list else []
        made: list[Any] = self._filled("list", old)
        self._made[number] = made
        made.extend([self.value(one, _at(before, i)) for i, one in enumerate(items)])
        return made

    def _deque(self, number: int, items: list[Node], maxlen: int | None, *, old: Any) -> deque[Any]:
        made: deque[Any] = self._filled("deque", old, maxlen)
        self._made[number] = made
        made.extend([self.value(one, None) for one in items])
        return made

    def _set(self, number: int, items: list[Node], *, old: Any) -> set[Any]:
        made: set[Any] = self._filled("set", old)
        self._made[number] = made
        made.update([self.value(one, None) for one in items])
        return made

    def _frozenset(self, number: int, items: list[Node], *, old: Any) -> frozenset[Any]:
        made = self._made[number] = frozenset(self.value(one, None) for one in items)
        return made

    def _dict(self, keys: Node, values: Node, *, old: Any) -> dict[Any, Any]:
        number = keys[2] if keys[0] == "column" else keys[1]
        names = self.value(keys, None)
        made = old if isinstance(old, dict) and self._claims(old) else {}
        before = dict(made)
        self._made[number] = made
        if values[0] == "column":
            new = unpack_column(values[3])
        else:
            new = [self.value(one, before.get(name)) for name, one in zip(names, values[2], strict=True)]
        made.clear()
        made.update(zip(names, new, strict=True))
        return made

    def _count(self, number: int, start: int, *, old: Any) -> Any:
        made = self._made[number] = itertools.count(start)
        return made

    def _array(self, number: int, dtype: str, shape: list[int], data: bytes, *, old: Any) -> np.ndarray:
        array = np.frombuffer(data, _dtype(dtype)).reshape(shape)
        made: np.ndarray
        if _has_form_of(array, old) and self._claims(old):
            old[...] = array
            made = old
        else:
            made = np.array(array)
        self._made[number] = made
        return made

    def _rows(self, number: int, rows: list[int], tokens: list[bytes], *, old: Any) -> np.ndarray:
        made: np.ndarray = old
        made[...] = 0
        for row, data in zip(rows, tokens, strict=True):
            made[row, : len(data) // 4] = np.frombuffer(data, np.int32)
        self._made[number] = made
        return made

    def _struct(self, kind: str, value: Any, *, old: Any) -> Any:
        return msgspec.convert(value, _listed(kind, STRUCT_BY_NAME))

    def _object(self, number: int, name: str, fields: dict[str, Node], *, old: Any) -> Any:
        kind = _listed(name, OBJECT_BY_NAME)
        made = old if type(old) is kind and self._claims(old) else _bare(kind)
        self._made[number] = made
        for field, node in fields.items():
            _check_field(kind, field)
            object.__setattr__(made, field, self.value(node, getattr(made, field, None)))
        return made


def _bare(kind: type) -> Any:
    """A new object; fields that older recordings do not have get their defaults."""
    made: Any = object.__new__(kind)
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if field.default is not dataclasses.MISSING:
            object.__setattr__(made, field.name, field.default)
    return made


def _at(items: Any, place: int) -> Any:
    return items[place] if isinstance(items, (list, tuple)) and place < len(items) else None


def _has_form_of(array: np.ndarray, old: Any) -> bool:
    """Whether `array` can be written into `old`."""
    if type(old) is not np.ndarray or not old.flags.writeable:
        return False
    return bool(old.shape == array.shape and old.dtype == array.dtype)
