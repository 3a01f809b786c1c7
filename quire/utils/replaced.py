"""`replaced`: a frozen record with some fields changed, for code that runs once per step."""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def replaced(record: Record, **changes: Any) -> Record:
    """As `dataclasses.replace`, in a third of its time.

    Args:
        record: of a dataclass with slots and without `__post_init__`; it is not changed.
        changes: values of its fields.
    """
    kind = type(record)
    copy = object.__new__(kind)
    for name in kind.__slots__:  # type: ignore[attr-defined]
        object.__setattr__(copy, name, changes[name] if name in changes else getattr(record, name))
    return copy
