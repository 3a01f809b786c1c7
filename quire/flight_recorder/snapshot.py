"""A scheduler's whole state as data, so that a recording can begin while requests run.

`freeze` copies what may change, quickly, between two steps; `encode` makes bytes of the copy, on another thread;
`restore` puts the bytes into a scheduler that was made anew from the same setup. The walk is generic: objects of
`quire`, containers, arrays and plain values. Functions (the clock, gates, caps) are no state: those of the new
scheduler stay. What it does not know is a `SnapshotError` with the path to it. Nothing read here runs code.
"""

from __future__ import annotations

import enum
import importlib
import itertools
import re
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from typing import Any

import msgspec
import numpy as np

from quire.errors import MessageError, QuireServerError
from quire.flight_recorder.columns import is_plain, pack_column, unpack_column
from quire.flight_recorder.privacy import without_texts
from quire.scheduler.request_table import RequestTable

SCALARS = (type(None), bool, int, float, str, bytes)
MODULES = re.compile(r"quire\.(scheduler|kv_cache|core|config)(\.\w+)*")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
MAX_STATE_BYTES = 1 << 31
Node = Any
"""A plain value, or a list whose first entry names its form."""


class SnapshotError(QuireServerError):
    """A part of the state has no form; the message says where."""


def freeze(root: Any) -> Node:
    """A copy of the state of `root`; later changes of `root` are not in it.

    Raises:
        SnapshotError: a part of it is of an unknown kind.
    """
    return _Freezer().node(root, type(root).__name__)


def encode(node: Node) -> bytes:
    """A frozen state as compressed bytes."""
    return zlib.compress(msgspec.msgpack.encode(node, enc_hook=_pack), 1)


def restore(root: Any, data: bytes) -> None:
    """Bring `root`, made anew from the same setup, into a state.

    Raises:
        MessageError: the bytes are no state of such an object.
    """
    try:
        stream = zlib.decompressobj()
        node = msgspec.msgpack.decode(stream.decompress(data, MAX_STATE_BYTES))
        _Restorer().value(node, root)
    except (zlib.error, msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise MessageError(f"the recorded state cannot be restored: {error}") from None


class _Column:
    """A container of plain values, to be packed later."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


def _pack(value: Any) -> Any:
    if isinstance(value, _Column):
        return pack_column(value.items)
    raise NotImplementedError(f"no form for a {type(value).__name__}")


def _attributes(value: Any) -> list[str]:
    names = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return [*names, *getattr(value, "__dict__", ())]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(one for one in slots if one != "__weakref__")


class _Freezer:
    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, enum.Enum):
            return ["enum", _name(kind), value.value]
        if isinstance(value, np.generic):
            return ["number", value.dtype.str, value.tobytes()]
        if isinstance(value, FUNCTIONS) or (callable(value) and not MODULES.fullmatch(kind.__module__)):
            return ["kept"]
        if kind is tuple:
            if is_plain([value]):
                return ["column", "tuple", 0, _Column(list(value))]
            return ["tuple", [self.node(one, f"{path}[{i}]") for i, one in enumerate(value)]]
        if id(value) in self._ids:
            return ["again", self._ids[id(value)]]
        self._ids[id(value)] = number = len(self._ids)
        return self._container(value, number, path)

    def _container(self, value: Any, number: int, path: str) -> Node:
        kind = type(value)
        if kind is np.ndarray:
            return ["array", number, value.dtype.str, value.shape, value.tobytes()]
        if kind in (list, set, frozenset):
            return self._items(kind.__name__, number, list(value), path)
        if kind is deque:
            return [*self._items("deque", number, list(value), path), value.maxlen]
        if kind in (dict, OrderedDict, defaultdict):
            keys, values = list(value), list(value.values())
            return ["dict", self._items("list", number, keys, path), self._items("list", -1, values, path)]
        if kind is itertools.count:
            return ["count", number, int(re.findall(r"-?\d+", repr(value))[0])]
        if isinstance(value, msgspec.Struct):
            return ["struct", _name(kind), msgspec.to_builtins(without_texts(value))]
        if MODULES.fullmatch(kind.__module__):
            return ["object", number, _name(kind), self._fields(value, path)]
        raise SnapshotError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no form in a recording")

    def _items(self, form: str, number: int, items: list[Any], path: str) -> Node:
        if is_plain(items):
            return ["column", form, number, _Column(items)]
        return [form, number, [self.node(one, f"{path}[{i}]") for i, one in enumerate(items)]]

    def _fields(self, value: Any, path: str) -> dict[str, Node]:
        fields = {}
        for name in _attributes(value):
            one = getattr(value, name)
            if isinstance(value, RequestTable) and name == "token_ids":
                fields[name] = self._token_rows(value)
            else:
                fields[name] = self.node(one, f"{path}.{name}")
        return fields

    def _token_rows(self, table: RequestTable) -> Node:
        """Of the largest array only what is in use."""
        rows = np.flatnonzero(table.handle >= 0)
        tokens = [table.token_ids[row, : table.num_tokens[row]].tobytes() for row in rows.tolist()]
        self._ids[id(table.token_ids)] = number = len(self._ids)
        return ["rows", number, rows.tolist(), tokens]


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    if not MODULES.fullmatch(module):
        raise ValueError(f"{name} is no class of a state")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{name} is no class")
    return found


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
        made: Any = getattr(self, f"_{form}")(*rest, old=old)
        return made

    def _kept(self, *, old: Any) -> Any:
        if old is None:
            raise ValueError("a function that the new scheduler does not have")
        return old

    def _again(self, number: int, *, old: Any) -> Any:
        return self._made[number]

    def _enum(self, kind: str, value: Any, *, old: Any) -> Any:
        return _class_of(kind)(value)

    def _number(self, dtype: str, data: bytes, *, old: Any) -> Any:
        return np.frombuffer(data, np.dtype(dtype))[0]

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
        array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
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
        return msgspec.convert(value, _class_of(kind))

    def _object(self, number: int, name: str, fields: dict[str, Node], *, old: Any) -> Any:
        kind = _class_of(name)
        made = old if type(old) is kind and self._claims(old) else object.__new__(kind)
        self._made[number] = made
        for field, node in fields.items():
            object.__setattr__(made, field, self.value(node, getattr(made, field, None)))
        return made


def _at(items: Any, place: int) -> Any:
    return items[place] if isinstance(items, (list, tuple)) and place < len(items) else None


def _has_form_of(array: np.ndarray, old: Any) -> bool:
    """Whether `array` can be written into `old`."""
    if type(old) is not np.ndarray or not old.flags.writeable:
        return False
    return bool(old.shape == array.shape and old.dtype == array.dtype)
