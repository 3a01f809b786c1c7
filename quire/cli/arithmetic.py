"""Arithmetic on a line of text, such as "(3 + 4) * 2.5": exact, and bounded in time and size. No state.

A recursive descent over the grammar

    sum      = product (("+" | "-") product)*
    product  = unary (("*" | "/" | "//" | "%") unary)*
    unary    = ("+" | "-") unary | power
    power    = atom ("**" unary)?
    atom     = number | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_CHARS = 500
MAX_DEPTH = 50
MAX_BITS = 1000  # of a numerator or denominator; more than a float could hold is no use to a reader
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)|(?P<sign>\*\*|//|[-+*/%^()x×·÷−]))", re.ASCII
)
SPELLINGS = {"^": "**", "x": "*", "×": "*", "·": "*", "÷": "/", "−": "-"}
Operation = Callable[[Fraction, Fraction], Fraction | int]
SUMS: Mapping[str, Operation] = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}
PRODUCTS: Mapping[str, Operation] = {
    "*": lambda a, b: a * b, "/": lambda a, b: a / b, "//": lambda a, b: a // b, "%": lambda a, b: a % b,
}  # fmt: skip


class ExpressionError(ValueError):
    """A text that cannot be computed; the message says why."""


def evaluate(text: str) -> int | float:
    """The value of `text`: exact if it is whole, else the nearest float.

    Raises:
        ExpressionError: it is no arithmetic, divides by zero, or is too long, too deep or too large.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"the expression has more than {MAX_CHARS} characters")
    value = _Parser(_tokens(text)).value()
    return value.numerator if value.denominator == 1 else float(value)


def _tokens(text: str) -> list[Fraction | str]:
    tokens: list[Fraction | str] = []
    text = text.rstrip()
    pos = 0
    while pos < len(text):
        match = TOKEN.match(text, pos)
        if match is None:
            raise ExpressionError(f"{text[pos:].lstrip()[:20]!r} is not a number, operator or parenthesis")
        sign = match["sign"]
        tokens.append(_bounded(Fraction(match["number"])) if sign is None else SPELLINGS.get(sign, sign))
        pos = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[Fraction | str]) -> None:
        self._tokens: list[Any] = [*tokens, ""]
        self._pos = 0
        self._depth = 0

    def value(self) -> Fraction:
        """The value of all tokens."""
        value = self._sum()
        if self._next:
            raise ExpressionError(f"{_shown(self._next)} is unexpected")
        return value

    @property
    def _next(self) -> Any:
        return self._tokens[self._pos]

    def _skip(self, *signs: str) -> str:
        """Read the next token if it is one of `signs`; "" if not."""
        found = self._next
        if not isinstance(found, str) or found not in signs:
            return ""
        self._pos += 1
        return found

    def _sum(self) -> Fraction:
        return self._chain(self._product, SUMS)

    def _product(self) -> Fraction:
        return self._chain(self._unary, PRODUCTS)

    def _chain(self, operand: Callable[[], Fraction], operations: Mapping[str, Operation]) -> Fraction:
        value = operand()
        while sign := self._skip(*operations):
            right = operand()
            if not right and sign not in "*+-":
                raise ExpressionError("division by zero")
            value = _bounded(Fraction(operations[sign](value, right)))
        return value

    def _unary(self) -> Fraction:
        self._depth += 1  # every way to nest leads through here
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"the expression nests more than {MAX_DEPTH} levels deep")
        sign = self._skip("+", "-")
        value = self._unary() if sign else self._power()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._atom()
        return _power(base, self._unary()) if self._skip("**") else base

    def _atom(self) -> Fraction:
        found = self._next
        if isinstance(found, Fraction):
            self._pos += 1
            return found
        if not self._skip("("):
            raise ExpressionError(f"a number is missing before {_shown(found)}" if found else "a number is missing")
        value = self._sum()
        if not self._skip(")"):
            raise ExpressionError("a parenthesis is not closed")
        return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("an exponent must be an integer")
    if not base and exponent < 0:
        raise ExpressionError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if size * abs(exponent) > MAX_BITS:
        raise _too_large()
    if size <= 0:  # 0, 1 or -1
        exponent = exponent % 2 + 2 * (exponent != 0)
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ExpressionError:
    return ExpressionError(f"a number has more than {MAX_BITS} bits")


def _shown(token: Any) -> str:
    return repr(token) if isinstance(token, str) else str(token)
