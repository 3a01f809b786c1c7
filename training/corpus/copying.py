"""Copying and looking up: repeat words, write JSON lists, read small tables, find who has what.

Dense practice for the one skill that stories, extraction and tool calls share:
finding a word of the prompt and writing it again. Called by the registry.
"""

from __future__ import annotations

import json
import random
from typing import Any

from training.corpus import words
from training.corpus.base import Sample, assistant, maybe_system, user

_FIELDS = {
    "name": words.NAMES,
    "city": words.CITIES,
    "color": words.COLOURS,
    "animal": words.ANIMALS,
    "job": words.JOBS,
    "day": words.DAYS,
    "month": words.MONTHS,
    "item": words.GOODS,
    "food": words.FOODS,
    "place": words.PLACES,
    "last name": words.SURNAMES,
    "hobby": words.HOBBIES,
    "thing": words.OBJECTS,
    "fruit": words.FRUITS,
}


def _value(rng: random.Random) -> Any:
    r = rng.random()
    if r < 0.15:
        return rng.randint(1, 999)
    return words.made_up_word(rng) if r < 0.2 else rng.choice(rng.choice(list(_FIELDS.values())))


def _repeat(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    items = [_value(rng) for _ in range(rng.randint(1, 8))]
    plain = [str(i) for i in items]
    if rng.random() < 0.5:
        shown = (", " if rng.random() < 0.5 else " ").join(plain)
        ask = rng.choice(("Repeat: {x}", "Say this again: {x}", "Repeat after me: {x}", "Copy this: {x}", "Echo {x}"))
        return [(ask.format(x=shown), shown)], ",".join(plain)
    ask = rng.choice(
        ("Write as a JSON list: {x}", "Make a JSON array of {x}", "JSON list of {x}", "{x}\n\nAs a JSON list.")
    )
    return [(ask.format(x=", ".join(plain)), json.dumps(items))], ",".join(plain)


def _table(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    fields = rng.sample(list(_FIELDS), rng.randint(2, 6))
    record: dict[str, Any] = {f: rng.choice(_FIELDS[f]) for f in fields}
    if rng.random() < 0.5:
        record["age"] = rng.randint(5, 95)
        fields.append("age")
    shown = rng.choice((", ", "\n")).join(f"{k}: {v}" for k, v in record.items())
    key = "|".join(map(str, record.values()))
    if rng.random() < 0.4:
        wanted = rng.sample(fields, rng.randint(1, len(fields)))
        ask = rng.choice(
            ("{t}\nGive {f} as JSON.", "Extract {f} as JSON: {t}", "{t}\n\nReturn JSON with the keys {f}.")
        )
        return [(ask.format(t=shown, f=words.join_and(wanted)), json.dumps({w: record[w] for w in wanted}))], key
    asked = [rng.choice(fields) for _ in range(rng.randint(1, 5))]
    turns = [
        (rng.choice(("What is the {f}?", "Which {f}?", "{f}?", "Tell me the {f}.")).format(f=f), f"{record[f]}")
        for f in asked
    ]
    return [(f"{shown}\n\n{turns[0][0]}", turns[0][1])] + turns[1:], key


def _people_and_things(rng: random.Random) -> tuple[list[str], list[str], str]:
    """Names, as many things, and what they do with these."""
    n = rng.randint(2, 6)
    people, pool = rng.sample(words.NAMES, n), rng.choice((words.OBJECTS, words.FOODS, words.ANIMALS, words.FRUITS))
    return people, rng.sample(pool, n), rng.choice(("has", "likes", "sees", "wants", "found", "lost"))


def _pairs(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    people, things, verb = _people_and_things(rng)
    n = len(people)
    base = {"has": "have", "likes": "like", "sees": "see", "wants": "want", "found": "find", "lost": "lose"}[verb]
    does = "did" if verb in ("found", "lost") else "does"
    shown = " ".join(f"{p} {verb} the {t}." for p, t in zip(people, things))
    turns = []
    for _ in range(rng.randint(1, 5)):
        i = rng.randrange(n)
        if rng.random() < 0.5:
            turns.append((f"Who {verb} the {things[i]}?", f"{people[i]} {verb} the {things[i]}."))
        else:
            turns.append((f"What {does} {people[i]} {base}?", f"{people[i]} {verb} the {things[i]}."))
    return [(f"{shown}\n\n{turns[0][0]}", turns[0][1])] + turns[1:], "|".join(people + things)


def _words(rng: random.Random, count: int) -> list[str]:
    """Draws words of all kinds, a few of them invented."""
    pools = list(_FIELDS.values())
    return [words.made_up_word(rng) if rng.random() < 0.1 else rng.choice(rng.choice(pools)) for _ in range(count)]


def make_recital(rng: random.Random, single: bool) -> Sample:
    """Long lists to repeat, and word pairs to look up: answers are pure copies."""
    kind = rng.randrange(4)
    if kind == 0:
        items = _words(rng, rng.randint(5, 30))
        answer = rng.choice((" ", ", ")).join(items)
        question = rng.choice(
            ("Repeat: {x}", "Copy this: {x}", "{x}\n\nSay this again.", "Read this aloud: {x}")
        ).format(x=answer)
    elif kind == 1:
        items = _words(rng, rng.randint(4, 20))
        answer = json.dumps(items)
        question = rng.choice(("Write as a JSON list: {x}", "JSON list of {x}", "{x}\n\nAs a JSON list.")).format(
            x=", ".join(items)
        )
    else:
        n = rng.randint(3, 12)
        firsts, seconds = rng.sample(rng.choice((words.NAMES, words.CITIES, words.OBJECTS)), n), _words(rng, n)
        link = rng.choice((" ", ": ", " - ", " likes ", " has the "))
        pairs = [f"{a}{link}{b}" for a, b in zip(firsts, seconds)]
        items, asked = pairs, rng.sample(range(n), n)
        answer = ", ".join(pairs[i] for i in asked)
        question = rng.choice(("{x}.\n\nTell me about {y}.", "{x}\nLook up: {y}", "Pairs: {x}\nFind {y}")).format(
            x=", ".join(pairs), y=", ".join(firsts[i] for i in asked)
        )
    return Sample(
        "recital", [user(question)], answer, {"kind": "exact", "value": answer}, ("recite:" + "|".join(items),)
    )


def _word_before(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    """Word pairs, of which the second words are given: they stand in the answer just before what is looked up."""
    n = rng.randint(2, 6)
    firsts = rng.sample(rng.choice((words.NAMES, words.CITIES, words.SURNAMES)), n)
    seconds = rng.sample(rng.choice((words.OBJECTS, words.FOODS, words.ANIMALS, words.FRUITS, words.JOBS)), n)
    link = rng.choice((" ", ": ", " - ", " has the ", " likes the ", " sees the ", " found the "))
    pairs = [f"{a}{link}{b}" for a, b in zip(firsts, seconds)]
    asked = rng.sample(range(n), n)
    ask = rng.choice(("{x}.\n\nWhat is before {y}?", "{x}\nLook up backwards: {y}", "Pairs: {x}\nWho: {y}"))
    question = ask.format(x=", ".join(pairs), y=", ".join(seconds[i] for i in asked))
    return [(question, ", ".join(f"{seconds[i]}: {firsts[i]}" for i in asked))], "recite:" + "|".join(pairs)


def _owners(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    """Who has something, one question after another."""
    people, things, verb = _people_and_things(rng)
    pairs = [f"{p} {verb} the {t}." for p, t in zip(people, things)]
    asked = rng.sample(range(len(people)), len(people))
    turns = [(f"Who {verb} the {things[i]}?", pairs[i]) for i in asked]
    shown = f"{' '.join(pairs)}\n\n{turns[0][0]}"
    return [(shown, turns[0][1]), *turns[1:]], "copy:" + "|".join(people + things)


def make_owners(rng: random.Random, single: bool) -> Sample:
    """What stands before a word: looked up backwards, several times for each text."""
    turns, key = rng.choice((_word_before, _word_before, _owners))(rng)
    return _sample_of("owners", [], turns[:1] if single else turns, key)


def make_copying(rng: random.Random, single: bool) -> Sample:
    """One of the copying exercises, with up to five questions."""
    turns, key = rng.choice((_repeat, _table, _pairs))(rng)
    if single:
        turns = turns[:1]
    return _sample_of("copying", maybe_system(rng, 0.1), turns, f"copy:{key}")


def _sample_of(task: str, messages: list[dict[str, Any]], turns: list[tuple[str, str]], key: str) -> Sample:
    """A conversation of questions with their answers, the last of which is to be learned."""
    for question, answer in turns[:-1]:
        messages = [*messages, user(question), assistant(answer)]
    question, answer = turns[-1]
    return Sample(task, [*messages, user(question)], answer, {"kind": "exact", "value": answer}, (key,))
