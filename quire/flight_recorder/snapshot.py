"""A scheduler's whole state as data, so that a recording can begin while requests run.

`freeze` copies what may change, quickly, between two steps; `encode` makes bytes of the copy, on another thread;
`restoring` reads them. The walk is generic: objects of listed classes (`state_classes`), containers, arrays and plain
values. Functions (the clock, gates, caps) are not state. Anything else is a `SnapshotError` with the path to it.
"""

from __future__ import annotations

import enum
import itertools
import re
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from quire.errors import QuireServerError
from quire.flight_recorder.columns import is_plain, pack_column
from quire.flight_recorder.privacy import without_texts
from quire.flight_recorder.state_classes import ENUM_BY_NAME, OBJECT_BY_NAME, STRUCT_BY_NAME, name_of, slots_of
from quire.scheduler.request_table import RequestTable

SCALARS = (type(None), bool, int, float, str, bytes)
PACKAGES = ("quire.scheduler", "quire.kv_cache", "quire.core", "quire.config")
"""Their callable objects may be state: not functions."""
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
MAX_STATE_BYTES = 1 << 28
"""Of an uncompressed state: about 1.4 million cached blocks."""
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
    """A frozen state as compressed bytes.

    Raises:
        SnapshotError: it is larger than what is read back.
    """
    state = msgspec.msgpack.encode(node, enc_hook=_pack)
    if len(state) > MAX_STATE_BYTES:
        raise SnapshotError(f"the state has {len(state)} bytes, a recording can have at most {MAX_STATE_BYTES}")
    return zlib.compress(state, 1)


class _Column:
    """A container of plain values, to be packed later."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


def _pack(value: Any) -> Any:
    if isinstance(value, _Column):
        return pack_column(value.items)
    raise NotImplementedError(f"no encoding for a {type(value).__name__}")


def _attributes(value: Any) -> list[str]:
    names = [name for name in slots_of(type(value)) if hasattr(value, name)]
    return [*names, *getattr(value, "__dict__", ())]


class _Freezer:
    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, enum.Enum):
            return ["enum", _listed(kind, ENUM_BY_NAME, path), value.value]
        if isinstance(value, np.generic):
            return ["number", value.dtype.str, value.tobytes()]
        if isinstance(value, FUNCTIONS) or (callable(value) and not kind.__module__.startswith(PACKAGES)):
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
            return ["struct", _listed(kind, STRUCT_BY_NAME, path), msgspec.to_builtins(without_texts(value))]
        return ["object", number, _listed(kind, OBJECT_BY_NAME, path), self._fields(value, path)]

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


def _listed(kind: type, listed: Mapping[str, type], path: str) -> str:
    name = name_of(kind)
    if name not in listed:
        raise SnapshotError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be recorded")
    return name
