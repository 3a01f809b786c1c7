"""Long containers of plain values as columns: types survive MessagePack, and no loop of Python runs over the items.

A scheduler keeps hundreds of thousands of small tuples (one for each cached block). Used by `snapshot`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

MAX_EMPTY_TUPLES = 1 << 20
SCALARS = frozenset((type(None), bool, int, float, str, bytes))


def is_plain(items: Sequence[Any]) -> bool:
    """Whether all items are plain values, or tuples of such at any depth, so that a shallow copy is a copy."""
    types = set(map(type, items))
    if types <= SCALARS:
        return True
    if not types <= SCALARS | {tuple}:
        return False
    return is_plain(list(chain.from_iterable(one for one in items if type(one) is tuple)))


def pack_column(items: Sequence[Any]) -> list[Any]:
    """Plain items in a form that MessagePack keeps.

    Returns:
        ["values", items]; ["equal", number of items, columns] for tuples of one length; ["ragged", lengths, column of
        all entries] for tuples of several; ["mixed", which are tuples, column of values, column of tuples].
    """
    types = set(map(type, items))
    if types <= SCALARS:
        return ["values", list(items)]
    if types != {tuple}:
        is_tuple = [type(one) is tuple for one in items]
        values = [one for one in items if type(one) is not tuple]
        return ["mixed", is_tuple, pack_column(values), pack_column([one for one in items if type(one) is tuple])]
    lengths = list(map(len, items))
    if min(lengths) == max(lengths):
        return ["equal", len(items), [pack_column(column) for column in zip(*items, strict=True)]]
    return ["ragged", lengths, pack_column(list(chain.from_iterable(items)))]


def unpack_column(packed: list[Any]) -> list[Any]:
    """The items of a packed column."""
    form, *rest = packed
    if form == "values":
        return list(rest[0])
    if form == "equal":
        num_items, columns = rest
        if not columns and num_items > MAX_EMPTY_TUPLES:
            raise ValueError(f"{num_items} empty tuples are more than a state can have")
        return list(zip(*map(unpack_column, columns), strict=True)) if columns else [()] * num_items
    if form == "ragged":
        entries = iter(unpack_column(rest[1]))
        return [tuple(islice(entries, length)) for length in rest[0]]
    is_tuple, values, tuples = rest[0], iter(unpack_column(rest[1])), iter(unpack_column(rest[2]))
    return [next(tuples if one else values) for one in is_tuple]
