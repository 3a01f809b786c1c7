r"""A regular expression in one form, so that every grammar library reads it as Python does. Pure functions.

Classes become sets of characters, ASCII as `\d`, `\w` and `\s` are, and are written anew; whatever a library might read
as syntax of its own is escaped; quantifiers are greedy, which for the whole of a text is the same. Surrogates are not
characters. Called for patterns in which `schema.regex` has found nothing to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

MAX_CHAR = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_NUL = (0, 0)
_QUOTING = (ord('"'), ord("\\"))
_SPECIAL = frozenset("\\^$.|?*+()[]{}")
_SPECIAL_IN_CLASS = frozenset("\\[]-")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_WRITTEN = {char: f"\\{name}" for name, char in _CONTROLS.items()}
_HEX = {"x": 2, "u": 4}
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]*)(?:(,)([0-9]*))?\}")

Ranges = list[tuple[int, int]]
"""Sorted ranges of code points, ends included, that do not touch."""


class RegexError(ValueError):
    """A pattern that is refused; says why."""


def normal(pattern: str, *, has_negated: bool = True, is_in_json: bool = False) -> str:
    """`pattern` in one form.

    Args:
        has_negated: classes may be written as what they leave out, which for some libraries holds surrogates, too.
        is_in_json: it is for strings of JSON. Where a class has all control characters llguidance allows all escapes,
            those of the quote and the backslash, too: a class that has not both leaves out NUL.

    Raises:
        RegexError: Python would refuse it, or it asks for half of a surrogate pair.
    """
    return _Reader(pattern, has_negated=has_negated, is_in_json=is_in_json).read()


def has_nul(pattern: str) -> bool:
    """Whether it names NUL by itself, not within a larger class."""
    reader = _Reader(pattern, has_negated=True)
    reader.read()
    return reader.has_nul


def classes_of(pattern: str) -> Iterable[tuple[int, int]]:
    """Ranges of the characters of all its classes."""
    reader = _Reader(pattern, has_negated=True)
    reader.read()
    return reader.ranges


class _Reader:
    """Goes through a pattern once; `_can_repeat` says whether a quantifier may come next."""

    def __init__(self, pattern: str, *, has_negated: bool, is_in_json: bool = False) -> None:
        self._pattern = pattern
        self._has_negated = has_negated
        self._is_in_json = is_in_json
        self._at = 0
        self._can_repeat = False
        self.ranges: Ranges = []
        self.has_nul = False

    def read(self) -> str:
        parts = []
        while self._at < len(self._pattern):
            quantifier = _QUANTIFIER.match(self._pattern, self._at)
            if quantifier is not None and quantifier.group() != "{}":
                parts.append(self._quantified(quantifier))
            else:
                parts.append(self._atom())
        return "".join(parts)

    def _quantified(self, found: re.Match[str]) -> str:
        if not self._can_repeat:
            raise RegexError(f"'{found.group()}' with nothing to repeat before it")
        self._can_repeat = False
        self._at = found.end()
        if self._pattern.startswith("?", self._at):  # as few as possible: the whole text matches or does not
            self._at += 1
        if found.group() in "*+?":
            return found.group()
        low = int(found[1] or 0)
        high = (int(found[3]) if found[3] else None) if found[2] else low
        if high is not None and high < low:
            raise RegexError(f"'{found.group()}', whose upper bound is less than its lower bound")
        return f"{{{low},{'' if high is None else high}}}" if found[2] else f"{{{low}}}"

    def _atom(self) -> str:
        char = self._pattern[self._at]
        if char in "(|)^$":
            self._at += 1
            self._can_repeat = char == ")"
            if char == "(" and self._pattern.startswith("?:", self._at):
                self._at += 2
                return "(?:"
            return char
        self._can_repeat = True
        if char == "[":
            return self._written(self._class())
        if char == ".":
            self._at += 1
            return char
        found = self._member()
        return self._written([(found, found)] if isinstance(found, int) else found)

    def _written(self, ranges: Ranges) -> str:
        self.has_nul = self.has_nul or ranges == [_NUL]
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _literal(ranges[0][0])
        if self._is_in_json and ranges[0][0] == 0 and not all(map(partial(_holds, ranges), _QUOTING)):
            ranges = _inverted([*_inverted(ranges), _NUL])
        return _class_of(ranges, has_negated=self._has_negated)

    def _class(self) -> Ranges:
        self._at += 1
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        members: Ranges = []
        while self._pattern[self._at] != "]":
            members += self._range()
        self._at += 1
        found = _inverted(members) if is_negated else _merged(members)
        if not found:
            raise RegexError("a class that matches no character")
        self.ranges += found
        return found

    def _range(self) -> Ranges:
        """A member of a class, or a range of two."""
        begin, first = self._at, self._member()
        if self._pattern[self._at] != "-" or self._pattern[self._at + 1] == "]":
            return [(first, first)] if isinstance(first, int) else first
        self._at += 1
        last = self._member()
        text = self._pattern[begin : self._at]
        if not isinstance(first, int) or not isinstance(last, int):
            raise RegexError(f"'{text}', a range with a class as its bound")
        if last < first:
            raise RegexError(f"'{text}', a reversed range")
        return [(first, last)]

    def _member(self) -> int | Ranges:
        """A character, or those of a named class."""
        char = self._pattern[self._at]
        self._at += 1
        if char == "\\":
            char = self._pattern[self._at]
            self._at += 1
            if char.lower() in _NAMED:
                named = _NAMED[char.lower()]
                return named if char in _NAMED else _inverted(named)
            if char in _HEX:
                digits = self._pattern[self._at : self._at + _HEX[char]]
                self._at += _HEX[char]
                char = chr(int(digits, 16))
            else:
                char = _CONTROLS.get(char, char)
        if _SURROGATES[0] <= ord(char) <= _SURROGATES[1]:
            raise RegexError(f"'\\u{ord(char):04x}', half of a surrogate pair")
        return ord(char)


_NAMED: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same characters, surrogates left out."""
    found: Ranges = []
    for low, high in sorted(_without_surrogates(ranges)):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    first, last = _SURROGATES
    for low, high in ranges:
        for begin, end in ((low, min(high, first - 1)), (max(low, last + 1), high)):
            if begin <= end:
                yield begin, end


def _inverted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Every other character."""
    found, begin = [], 0
    for low, high in _merged(ranges):
        found.append((begin, low - 1))
        begin = high + 1
    return _merged((low, high) for low, high in [*found, (begin, MAX_CHAR)] if low <= high)


def _holds(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _class_of(ranges: Ranges, *, has_negated: bool) -> str:
    """A class of these characters; what holds the last of all characters is written as what it leaves out."""
    is_negated = has_negated and ranges[-1][1] == MAX_CHAR
    shown = _inverted(ranges) if is_negated else ranges
    if not shown:
        return "[\\s\\S]"
    return f"[{'^' if is_negated else ''}{_members(shown)}]"


def _members(ranges: Ranges) -> str:
    """A caret stands at the end, where no library takes it for a negation."""
    caret = ord("^")
    parts, has_caret = [], False
    for low, high in ranges:
        if caret in (low, high):
            has_caret = True
            low, high = (low + 1, high) if low == caret else (low, high - 1)
        if low <= high:
            parts.append(_in_class(low) + ("" if low == high else ("-" if high > low + 1 else "") + _in_class(high)))
    if has_caret:
        parts.append("^" if parts else "\\^")
    return "".join(parts)


def _in_class(point: int) -> str:
    return f"\\{chr(point)}" if chr(point) in _SPECIAL_IN_CLASS else _shown(point)


def _literal(point: int) -> str:
    return f"\\{chr(point)}" if chr(point) in _SPECIAL else _shown(point)


def _shown(point: int) -> str:
    char = chr(point)
    if char in _WRITTEN:
        return _WRITTEN[char]
    return f"\\x{point:02x}" if point < 0x20 or point == 0x7F else char
