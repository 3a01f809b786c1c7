"""Arithmetic tasks: two-digit sums (measured), differences, small products.

The key of a sum is its unordered pair, and a difference c - a carries the key of
the sum a + (c - a), so a held-out pair never shows up in training in any form.
Called by the registry.
"""

from __future__ import annotations

import random

from training.corpus import words
from training.corpus.base import Sample, assistant, maybe_system, sum_key, user

_SUM = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=",
    "{a} + {b} = ?",
    "What's {a} + {b}?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "{a} plus {b}",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Sum {a} and {b}.",
    "Please add {a} and {b}.",
    "Can you add {a} and {b}?",
    "what does {a} + {b} equal",
    "what is {a}+{b}",
    "Tell me {a} + {b}.",
    "Work out {a} + {b}.",
    "I need the sum {a} + {b}.",
    "{a} and {b} make?",
)
_DIFFERENCE = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "What's {a} - {b}?",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "Take {b} away from {a}.",
    "What is the difference between {a} and {b}?",
    "{a} minus {b}",
    "Work out {a} - {b}.",
)
_PRODUCT = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a} x {b}",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
    "{a} times {b}",
    "Compute {a} * {b}.",
    "What's {a} * {b}?",
    "{a}*{b}",
)


def two_digits(rng: random.Random) -> int:
    """Returns a number from 10 to 99."""
    return rng.randint(10, 99)


def _sum_turn(rng: random.Random, a: int, b: int) -> tuple[str, str]:
    question = rng.choice(_SUM).format(a=a, b=b)
    return _drop_mark(rng, question), f"{a} + {b} = {a + b}"


def _drop_mark(rng: random.Random, question: str) -> str:
    if rng.random() < 0.15:
        question = question.rstrip("?.").rstrip()
    return question[0].lower() + question[1:] if rng.random() < 0.1 else question


def _word_problem(rng: random.Random, a: int, b: int) -> tuple[str, str]:
    name, item, box = rng.choice(words.NAMES), rng.choice(words.FRUITS), rng.choice(("box", "bag", "basket"))
    he = words.pronouns(name)[0]
    question = rng.choice(
        (
            f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?",
            f"There are {a} {item} in one {box} and {b} in another. How many {item} are there in all?",
            f"{name} bought {a} {item} on Monday and {b} on Tuesday. How many did {he} buy?",
            f"{name} picked {a} {item}, then {b} more. How many {item} is that?",
        )
    )
    return question, f"{a} + {b} = {a + b} {item}"


def _conversation(rng: random.Random, task: str, turns: list[tuple[str, str]], keys: list[str], value: int) -> Sample:
    messages = maybe_system(rng, 0.15)
    for question, answer in turns[:-1]:
        messages += [user(question), assistant(answer)]
    messages.append(user(turns[-1][0]))
    return Sample(task, messages, turns[-1][1], {"kind": "number", "value": value}, tuple(keys))


def make_sums(rng: random.Random, single: bool) -> Sample:
    """Sums of two numbers from 10 to 99; several turns unless `single`."""
    turns, keys, total = [], [], 0
    for _ in range(1 if single else rng.choice((1, 1, 3, 5, 6))):
        a, b = two_digits(rng), two_digits(rng)
        turns.append(_sum_turn(rng, a, b))
        keys.append(sum_key(a, b))
        total = a + b
    return _conversation(rng, "sums", turns, keys, total)


def make_word_sums(rng: random.Random, single: bool) -> Sample:
    """Two-digit sums dressed as a one-line story."""
    a, b = two_digits(rng), two_digits(rng)
    question, answer = _word_problem(rng, a, b)
    sample = _conversation(rng, "word_sums", [(question, answer)], [sum_key(a, b)], a + b)
    sample.check = {"kind": "text", "must": [str(a + b)]}
    return sample


def make_differences(rng: random.Random, single: bool) -> Sample:
    """Differences whose result and subtrahend have at most two digits."""
    turns, keys, value = [], [], 0
    for _ in range(1 if single else rng.choice((1, 3, 5))):
        x, y = rng.randint(1, 99), rng.randint(1, 99)
        big, small = max(x, y), min(x, y)
        value = big - small
        question = _drop_mark(rng, rng.choice(_DIFFERENCE).format(a=big, b=small))
        turns.append((question, f"{big} - {small} = {value}"))
        keys.append(sum_key(small, value))
    return _conversation(rng, "differences", turns, keys, value)


def make_small(rng: random.Random, single: bool) -> Sample:
    """One-digit sums and products up to 12 x 12 (a table to remember: no held-out part)."""
    turns, value = [], 0
    for _ in range(1 if single else rng.choice((1, 3, 5))):
        if rng.random() < 0.4:
            a, b = rng.randint(0, 9), rng.randint(0, 20)
            a, b = (a, b) if rng.random() < 0.5 else (b, a)
            if a > 9 and b > 9:
                a = 9
            value = a + b
            turns.append(_sum_turn(rng, a, b))
        else:
            a, b = rng.randint(1, 12), rng.randint(1, 12)
            value = a * b
            turns.append((_drop_mark(rng, rng.choice(_PRODUCT).format(a=a, b=b)), f"{a} * {b} = {value}"))
    return _conversation(rng, "small_arithmetic", turns, [], value)
