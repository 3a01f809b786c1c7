"""Counting and sorting of short lists. Called by the registry."""

from __future__ import annotations

import random

from training.corpus import words
from training.corpus.base import Sample, maybe_system, roughen, user


def make_counting(rng: random.Random, single: bool) -> Sample:
    """Counts the items of a list, or how often one word occurs in it."""
    pool = rng.choice((words.ANIMALS, words.OBJECTS, words.COLOURS, words.NAMES))
    n = rng.randint(2, 9)
    if rng.random() < 0.5:
        items = rng.sample(pool, n)
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
        noun, value = "items", n
    else:
        kinds = rng.sample(pool, 3)
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
        noun, value = "times", items.count(target)
    if value == 1:
        noun = noun[:-1]
    answer = f"{value} {noun}."
    return Sample(
        "counting",
        maybe_system(rng, 0.15) + [user(roughen(rng, question))],
        answer,
        {"kind": "text", "must": [str(value)]},
        (f"count:{question}",),
    )


def make_sorting(rng: random.Random, single: bool) -> Sample:
    """Sorts three to six numbers or words."""
    n = rng.randint(3, 6)
    if rng.random() < 0.65:
        items = [str(i) for i in rng.sample(range(1, 100), n)]
        down = rng.random() < 0.3
        result = sorted(items, key=int, reverse=down)
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
    else:
        items = rng.sample(rng.choice((words.ANIMALS, words.NAMES, words.COLOURS, words.OBJECTS)), min(n, 5))
        result = sorted(items)
        question = rng.choice(
            (
                "Sort these words alphabetically: {x}",
                "Put these words in alphabetical order: {x}",
                "Sort from A to Z: {x}",
                "Alphabetical order, please: {x}",
            )
        )
    answer = ", ".join(result)
    key = "sort:" + ",".join(sorted(items))
    return Sample(
        "sorting",
        maybe_system(rng, 0.15) + [user(roughen(rng, question.format(x=", ".join(items))))],
        answer,
        {"kind": "exact", "value": answer},
        (key,),
    )
