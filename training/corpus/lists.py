"""Counting, sorting and comparing of short lists. Called by the registry.

A count is written as it is made: the items with their numbers, then the total. Sorted lists need no such help, as each
word of the answer is one choice among what is left; comparisons of two and of few items are practice for that choice.
"""

from __future__ import annotations

import random

from training.corpus import words
from training.corpus.base import Sample, maybe_system, roughen, user

_POOLS = (words.ANIMALS, words.OBJECTS, words.COLOURS, words.NAMES)


def _count_all(rng: random.Random, n: int) -> tuple[str, str, int]:
    """Returns (question, answer, count) for the number of items of a list."""
    items = rng.sample(rng.choice(_POOLS), n)
    shown = ", ".join(items) if rng.random() < 0.6 else words.join_and(items)
    question = rng.choice(
        (
            "How many words are in this list: {x}?",
            "Count the items: {x}",
            "How many items are there: {x}?",
            "Count these words: {x}",
            "How many things are in the list {x}?",
            "How many are there? {x}",
        )
    ).format(x=shown)
    steps = ", ".join(f"{i} {item}" for i, item in enumerate(items, start=1))
    return question, f"{steps}: {n} {'item' if n == 1 else 'items'}.", n


def _count_word(rng: random.Random, n: int) -> tuple[str, str, int]:
    """Returns (question, answer, count) for the number of times that a word occurs in a list."""
    kinds = rng.sample(rng.choice(_POOLS), 3)
    items = [rng.choice(kinds) for _ in range(n)]
    target = rng.choice(items)
    question = rng.choice(
        (
            "How many times does {t} appear in: {x}?",
            "Count the word {t} in this list: {x}",
            "How often does {t} occur in {x}?",
            "How many times do you see {t} here: {x}?",
        )
    ).format(t=target, x=", ".join(items))
    steps, count = [], 0
    for item in items:
        count += item == target
        steps.append(f"{count} {item}" if item == target else item)
    return question, f"{', '.join(steps)}: {count} {'time' if count == 1 else 'times'}.", count


def _counting(rng: random.Random, task: str, n: int) -> Sample:
    question, answer, value = (_count_all if rng.random() < 0.5 else _count_word)(rng, n)
    prompt = maybe_system(rng, 0.15) + [user(roughen(rng, question))]
    return Sample(task, prompt, answer, {"kind": "number", "value": value}, (f"count:{question}",))


def make_counting(rng: random.Random, single: bool) -> Sample:
    """Counts two to nine items of a list, or how often one word occurs in it."""
    return _counting(rng, "counting", rng.randint(2, 9))


def make_short_counting(rng: random.Random, single: bool) -> Sample:
    """The same with one to four items."""
    return _counting(rng, "short_counting", rng.randint(1, 4))


def _sort_numbers(rng: random.Random, n: int) -> tuple[str, list[str], list[str]]:
    """Returns (question with {x}, items, sorted items)."""
    items = [str(i) for i in rng.sample(range(1, 100), n)]
    down = rng.random() < 0.3
    question = rng.choice(
        (
            "Sort these numbers from largest to smallest: {x}",
            "Sort in descending order: {x}",
            "Put these numbers in descending order: {x}",
            "Order from high to low: {x}",
        )
        if down
        else (
            "Sort these numbers: {x}",
            "Sort in ascending order: {x}",
            "Put these numbers in order: {x}",
            "Sort from smallest to largest: {x}",
            "Order these numbers from low to high: {x}",
            "sort {x}",
        )
    )
    return question, items, sorted(items, key=int, reverse=down)


def _sort_words(rng: random.Random, n: int) -> tuple[str, list[str], list[str]]:
    """Returns (question with {x}, items, sorted items)."""
    items = rng.sample(rng.choice((words.ANIMALS, words.NAMES, words.COLOURS, words.OBJECTS)), n)
    question = rng.choice(
        (
            "Sort these words alphabetically: {x}",
            "Put these words in alphabetical order: {x}",
            "Sort from A to Z: {x}",
            "Alphabetical order, please: {x}",
        )
    )
    return question, items, sorted(items)


def _sorting(rng: random.Random, task: str, least: int, most: int) -> Sample:
    n = rng.randint(least, most)
    question, items, result = _sort_numbers(rng, n) if rng.random() < 0.65 else _sort_words(rng, min(n, 5))
    answer = ", ".join(result)
    prompt = maybe_system(rng, 0.15) + [user(roughen(rng, question.format(x=", ".join(items))))]
    return Sample(task, prompt, answer, {"kind": "exact", "value": answer}, ("sort:" + ",".join(sorted(items)),))


def make_sorting(rng: random.Random, single: bool) -> Sample:
    """Sorts three to six numbers or words."""
    return _sorting(rng, "sorting", 3, 6)


def make_short_sorting(rng: random.Random, single: bool) -> Sample:
    """Sorts two or three numbers or words."""
    return _sorting(rng, "short_sorting", 2, 3)


def make_comparing(rng: random.Random, single: bool) -> Sample:
    """The smallest or largest of two to five numbers, or the word that comes first or last in the alphabet."""
    n, numbers, last = rng.randint(2, 5), rng.random() < 0.65, rng.random() < 0.4
    items = [str(i) for i in rng.sample(range(1, 100), n)] if numbers else rng.sample(rng.choice(_POOLS), n)
    ordered = sorted(items, key=int) if numbers else sorted(items)
    answer = ordered[-1] if last else ordered[0]
    if numbers:
        word = "largest" if last else "smallest"
        asks = (f"Which is the {word}: {{x}}?", f"{word.capitalize()} of {{x}}?")
    else:
        word = "last" if last else "first"
        asks = (f"Which comes {word} in the alphabet: {{x}}?", f"{word.capitalize()} of {{x}} from A to Z?")
    question = rng.choice(asks).format(x=", ".join(items))
    prompt = maybe_system(rng, 0.15) + [user(roughen(rng, question))]
    return Sample("comparing", prompt, answer, {"kind": "exact", "value": answer}, ("sort:" + ",".join(sorted(items)),))
