"""Short reasoning inside <think>...</think>, then the answer.

Reasoning is switched on by the word "/think" at the end of the system message;
without it no other task thinks. Called by the registry.
"""

from __future__ import annotations

import random

from training.corpus import arithmetic, chat, stories, words
from training.corpus.base import Sample, roughen, sum_key, system, user

_HEADS = (
    "/think",
    "You are leaf. /think",
    "You are a helpful assistant. /think",
    "Think first. /think",
    "You are a friendly assistant. /think",
    "Answer briefly. /think",
    "Help the user. /think",
)


def _sum(rng: random.Random) -> tuple[str, str, str, dict, str]:
    a, b = arithmetic.two_digits(rng), arithmetic.two_digits(rng)
    question = rng.choice(
        (f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}", f"Add {a} and {b}.", f"How much is {a} plus {b}?")
    )
    ones = a % 10 + b % 10
    carry = ones // 10
    steps = f"{a % 10} + {b % 10} = {ones}. Write {ones % 10}, carry {carry}. "
    steps += f"{a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}."
    return question, steps, f"{a} + {b} = {a + b}", {"kind": "number", "value": a + b}, sum_key(a, b)


def _bigger(rng: random.Random) -> tuple[str, str, str, dict, str]:
    x, y = rng.sample(range(1, 1000), 2)
    big, small = max(x, y), min(x, y)
    question = rng.choice(
        (f"Which is bigger, {x} or {y}?", f"Which number is larger: {x} or {y}?", f"Is {x} or {y} bigger?")
    )
    digits = f"{x} has {len(str(x))} digits and {y} has {len(str(y))}."
    if len(str(x)) == len(str(y)):
        i = next(i for i in range(3) if str(x)[i] != str(y)[i])
        digits += f" The first difference is {str(big)[i]} and {str(small)[i]}."
    return (
        question,
        digits,
        f"{big} is bigger.",
        {"kind": "text", "must": [str(big)], "no": [str(small)]},
        f"big:{small}:{big}",
    )


def _age(rng: random.Random) -> tuple[str, str, str, dict, str]:
    people = rng.sample(words.NAMES, 3)
    relation, opposite = rng.choice((("older", "youngest"), ("taller", "shortest"), ("faster", "slowest")))
    best = {"older": "oldest", "taller": "tallest", "faster": "fastest"}[relation]
    a, b, c = people
    lines = [f"{a} is {relation} than {b}.", f"{b} is {relation} than {c}."]
    rng.shuffle(lines)
    ask, who = (best, a) if rng.random() < 0.5 else (opposite, c)
    return (
        f"{' '.join(lines)} Who is the {ask}?",
        f"The order is {a}, {b}, {c}. The {ask} is {who}.",
        f"{who} is the {ask}.",
        {"kind": "text", "must": [who], "no": [p for p in people if p != who]},
        f"order:{a}:{b}:{c}",
    )


def _quote(rng: random.Random) -> tuple[str, str, str, dict, str]:
    events = stories.build_story(rng, rng.randint(3, 5))
    event = rng.choice(events)
    fact = rng.choice(event.facts)
    story = " ".join(e.sentence for e in events)
    return (
        f"{story}\n\n{rng.choice(fact.questions)}",
        f"The text says: {event.sentence}",
        fact.answer,
        {"kind": "text", "must": [fact.value]},
        fact.key,
    )


def _small_talk(rng: random.Random) -> tuple[str, str, str, dict, str]:
    sample = chat.make_chat(rng, True)
    thought = "I do not know this." if "don't know" in sample.answer else "This is small talk."
    return sample.messages[-1]["content"], thought, sample.answer, {"kind": "text", "must": []}, "".join(sample.keys)


def make_think(rng: random.Random, single: bool) -> Sample:
    """A question whose answer is preceded by a short thought."""
    makers = (_sum, _sum, _bigger, _age, _quote) if single else (_sum, _sum, _bigger, _age, _quote, _small_talk)
    question, thought, answer, check, key = rng.choice(makers)(rng)
    reply = f"<think>\n{thought}\n</think>\n\n{answer}"
    return Sample(
        "thinking",
        [system(rng.choice(_HEADS)), user(roughen(rng, question))],
        reply,
        {**check, "thought": True},
        (key,) if key else (),
    )
