"""The calculator of `quire chat --tools demo`: right, exact, and bounded whatever it is given."""

from __future__ import annotations

import math
import operator
import random
from fractions import Fraction

import pytest

from quire.cli.arithmetic import MAX_CHARS, ExpressionError, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("27 + 58", 85),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("10-4-3", 3),
        ("100/5/2", 10),
        ("-2**2", -4),
        ("2**-1", 0.5),
        ("2**3**2", 512),
        ("2^10", 1024),
        ("7 // 2", 3),
        ("-7 // 2", -4),
        ("7 % 3", 1),
        ("--3", 3),
        ("+-+3", -3),
        ("0.1 + 0.2", 0.3),
        ("1/3", 1 / 3),
        ("1.5e3", 1500),
        (".5*4.", 2),
        ("6 × 7 − 2 ÷ 4", 41.5),
        ("3 x 4 · 2", 24),
        (" ( ( 7 ) ) ", 7),
        ("1e-3", 0.001),
        ("0**0", 1),
        ("(-1)**999999999999", -1),
        ("0**5", 0),
        ("2**999/2**998", 2),
        ("1**-5", 1),
        ("5 - -5", 10),
    ],
)
def test_an_expression_has_its_value(text, value):
    found = evaluate(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a number is missing"),
        ("2 +", "a number is missing"),
        ("(2", "not closed"),
        ("2)", "'\\)' is unexpected"),
        ("2 3", "3 is unexpected"),
        ("* 2", "missing before '\\*'"),
        ("1/0", "division by zero"),
        ("5 % 0", "by zero"),
        ("5 // (1-1)", "by zero"),
        ("0**-1", "by zero"),
        ("2**0.5", "an integer"),
        ("2**2000", "1000 bits"),
        ("9**9**9**9", "1000 bits"),
        ("1e999", "1000 bits"),
        ("2**900 * 2**900", "1000 bits"),
        ("(" * 60 + "1", "50 levels"),
        ("-" * 99 + "1", "50 levels"),
        ("1" * (MAX_CHARS + 1), "500 characters"),
        ("sqrt(2)", "'sqrt\\(2\\)' is not a number"),
        ("__import__('os')", "is not a number"),
        ("1 if 2 else 3", "'if 2 else 3'"),
        ("٣ + 1", "is not a number"),
        ("2\0", "is not a number"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_arithmetic_is_refused_with_the_reason(text, words):
    with pytest.raises(ExpressionError, match=words):
        evaluate(text)


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
Made = tuple[str, int]


def make(rng: random.Random, depth: int) -> Made:
    """A random expression of an integers and its value, by Python's own operators."""
    if not depth or rng.random() < 0.2:
        number = rng.randint(0, 99)
        return str(number), number
    (left, a), (right, b) = make(rng, depth - 1), make(rng, depth - 1)
    sign = rng.choice([one for one in OPERATIONS if b or one not in ("//", "%")])
    value = OPERATIONS[sign](a, b)
    text = f"({left}){sign}({right})" if rng.random() < 0.5 else f"(({left}) {sign} ({right}))"
    return (f"-({text})", -value) if rng.random() < 0.2 else (text, value)


def test_random_expressions_are_what_python_says():
    rng = random.Random(3)
    for _ in range(300):
        text, value = make(rng, 4)
        if len(text) <= MAX_CHARS:
            assert evaluate(text) == value, text


def test_operators_of_one_rank_and_of_two_group_as_in_python():
    rng = random.Random(5)
    for _ in range(300):
        numbers = [rng.randint(1, 9) for _ in range(6)]
        signs = [rng.choice("+-*") for _ in range(5)]
        terms = [[numbers[0]]]
        for sign, number in zip(signs, numbers[1:]):
            if sign == "*":
                terms[-1].append(number)
            else:
                terms.append([number if sign == "+" else -number])
        text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:]))
        assert evaluate(text) == sum(map(math.prod, terms)), text


def test_random_characters_are_computed_or_refused_and_never_anything_else():
    rng = random.Random(4)
    for _ in range(2000):
        text = "".join(rng.choice("0123456789..eE+-**//%^()x ") for _ in range(rng.randint(1, 30)))
        try:
            assert math.isfinite(Fraction(evaluate(text)))
        except ExpressionError as error:
            assert str(error)
