"""Checks of single values that came from outside: type, finiteness, range, choice.

Called by `core.sampling_params`, `core.inputs` and `config.base`; each names the field, what was given and
what is allowed. No state. Python's and numpy's numbers pass; bools and numeric text do not.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence, Set
from itertools import islice
from typing import Any

from quire.errors import QuireError, ValidationError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
SHOWN_CHARS = 80


class _ShortRepr(reprlib.Repr):
    """`repr` whose cost does not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = SHOWN_CHARS
        self.maxstring = self.maxlong = self.maxother = 2 * SHOWN_CHARS
        self.maxlevel = 5

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return super().repr_int(x, level) if bits < 4096 else f"<integer of {bits} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, SHOWN_CHARS)]
        return "{" + ", ".join(items) + "}"


def shown(value: object) -> str:
    """`repr(value)` short enough for an error message, at a cost that does not grow with the value."""
    text = repr(value[:SHOWN_CHARS]) if isinstance(value, str) else _ShortRepr().repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def wrong_type(
    field: str, value: object, expected: str, error: type[QuireError] = ValidationError, hint: str | None = None
) -> QuireError:
    """An error of class `error`: `field` must be `expected`, such as "an integer"."""
    message = f"{field} must be {expected}, got {shown(value)} ({type(value).__name__})"
    return error(message, hint=hint or f"pass {expected}", field=field_in(field))


def out_of_range(field: str, value: object, allowed: str, error: type[QuireError] = ValidationError) -> QuireError:
    """An error of class `error`: `field` must be `allowed`, such as "in [0, 1]"."""
    return error(f"{field}={shown(value)} is out of range", hint=f"{field} must be {allowed}", field=field_in(field))


def field_in(label: str) -> str:
    """The field that a label is about: `messages` in `len(messages)`, `stop` in `a key of stop`, `n` in `n key`."""
    label = label.removeprefix("len(").removesuffix(")")
    return label.rpartition(" of ")[2].partition(" ")[0]


def check_int(
    field: str,
    value: Any,
    minimum: int = INT64_MIN,
    maximum: int = INT64_MAX,
    error: type[QuireError] = ValidationError,
) -> int:
    """`value` as an int in [minimum, maximum]; raises `error` otherwise."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise wrong_type(field, value, "an integer", error)
    number = int(value)
    if not minimum <= number <= maximum:
        raise out_of_range(field, value, range_text(minimum, maximum), error)
    return number


def check_float(
    field: str,
    value: Any,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: float = -math.inf,
    error: type[QuireError] = ValidationError,
) -> float:
    """`value` as a finite float in [minimum, maximum] and greater than `above`; raises `error` otherwise."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise wrong_type(field, value, "a number", error)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and minimum <= number <= maximum and number > above):
        low = f"({above:g}" if above >= minimum else f"[{minimum:g}"
        allowed = f"a finite number in {low}, {maximum:g}]"
        raise out_of_range(field, value, allowed.replace(", inf]", ", infinity)").replace("[-inf", "(-infinity"), error)
    return number


def check_bool(field: str, value: Any, error: type[QuireError] = ValidationError) -> bool:
    """`value` if it is True or False; raises `error` otherwise."""
    if not isinstance(value, bool):
        raise wrong_type(field, value, "true or false", error)
    return value


def check_text(field: str, value: Any, error: type[QuireError] = ValidationError) -> str:
    """`value` if it is text; raises `error` otherwise."""
    if not isinstance(value, str):
        raise wrong_type(field, value, "a string", error)
    return value


def check_int_list(
    field: str, value: Any, minimum: int, maximum: int, error: type[QuireError] = ValidationError
) -> list[int]:
    """`value` as a list of ints in [minimum, maximum]; a set, tuple or 1-D integer array passes too."""
    if getattr(value, "ndim", None) == 1:
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        raise wrong_type(field, value, "a list of integers", error)
    items = list(value)
    for item_type in set(map(type, items)) - {int}:
        if item_type is bool or not issubclass(item_type, numbers.Integral):
            bad = next(i for i, item in enumerate(items) if type(item) is item_type)
            raise wrong_type(f"{field}[{bad}]", items[bad], "an integer", error)
        items = [int(item) for item in items]
    if items and not (minimum <= min(items) and max(items) <= maximum):
        bad = next(i for i, item in enumerate(items) if not minimum <= item <= maximum)
        raise out_of_range(f"{field}[{bad}]", items[bad], range_text(minimum, maximum), error)
    return items


def range_text(minimum: float, maximum: float) -> str:
    """The range in words, for a hint."""
    if maximum >= INT64_MAX and minimum > INT64_MIN:
        return f"at least {minimum}"
    if minimum <= INT64_MIN and maximum < INT64_MAX:
        return f"at most {maximum}"
    return f"in [{minimum}, {maximum}]"
