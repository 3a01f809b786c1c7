"""Conversions of units, dates, weekdays and number words. Called by the registry."""

from __future__ import annotations

import random

from training.corpus import words
from training.corpus.base import Sample, maybe_system, roughen, user

# (from unit, to unit, factor, smallest, largest amount)
_UNITS = (
    ("meters", "centimeters", 100, 1, 99),
    ("kilometers", "meters", 1000, 1, 99),
    ("kilograms", "grams", 1000, 1, 99),
    ("hours", "minutes", 60, 1, 12),
    ("minutes", "seconds", 60, 1, 12),
    ("days", "hours", 24, 1, 10),
    ("weeks", "days", 7, 1, 12),
    ("years", "months", 12, 1, 12),
    ("feet", "inches", 12, 1, 12),
    ("liters", "milliliters", 1000, 1, 99),
    ("centimeters", "millimeters", 10, 1, 99),
    ("dollars", "cents", 100, 1, 99),
    ("dozens", "items", 12, 1, 10),
)
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _unit(rng: random.Random) -> tuple[str, str, list[str], str]:
    big, small, factor, low, high = rng.choice(_UNITS)
    n = rng.randint(low, high)
    if rng.random() < 0.7:
        amount, source, result, target = n, big, n * factor, small
    else:
        amount, source, result, target = n * factor, small, n, big
    question = rng.choice(
        (
            "Convert {n} {s} to {t}.",
            "How many {t} are {n} {s}?",
            "How many {t} are in {n} {s}?",
            "{n} {s} in {t}?",
            "What is {n} {s} in {t}?",
            "Change {n} {s} into {t}.",
        )
    ).format(n=amount, s=source, t=target)
    # Conversions of the large amounts are digit shifts; the small ones are tables, never held out.
    key = f"unit:{big}:{small}:{n}" if factor in (10, 100, 1000) else "table"
    return question, f"{amount} {source} = {result} {target}", [f"{result} {target}"], key


def _iso(rng: random.Random) -> tuple[str, str, list[str], str]:
    year, month = rng.randint(1950, 2035), rng.randint(1, 12)
    day = rng.randint(1, _MONTH_DAYS[month - 1])
    iso, text = f"{year}-{month:02d}-{day:02d}", f"{words.MONTHS[month - 1]} {day}, {year}"
    if rng.random() < 0.6:
        written = rng.choice((text, f"{day} {words.MONTHS[month - 1]} {year}"))
        question = rng.choice(
            (
                "Write {d} as an ISO date.",
                "Convert {d} to YYYY-MM-DD.",
                "What is {d} in ISO format?",
                "Write the date {d} in the form YYYY-MM-DD.",
                "{d} as YYYY-MM-DD",
            )
        ).format(d=written)
        return question, iso, [iso], f"date:{iso}"
    question = rng.choice(
        (
            "Write {d} in words.",
            "Which date is {d}?",
            "Spell out the date {d}.",
            "What date is {d}?",
        )
    ).format(d=iso)
    return question, text, [text], f"date:{iso}"


def _weekday(rng: random.Random) -> tuple[str, str, list[str], str]:
    i, n = rng.randrange(7), rng.randint(1, 6)
    start = words.DAYS[i]
    if rng.random() < 0.3:
        step, question = 1, rng.choice((f"Which day comes after {start}?", f"What day follows {start}?"))
    elif rng.random() < 0.4:
        step, question = -1, rng.choice((f"Which day comes before {start}?", f"What is the day before {start}?"))
    else:
        step, question = (
            n,
            rng.choice((f"Today is {start}. Which day is it in {n} days?", f"What day is {n} days after {start}?")),
        )
    day = words.DAYS[(i + step) % 7]
    return question, f"{day}.", [day], "table"


def _twelve_hours(rng: random.Random) -> tuple[str, str, list[str], str]:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    long, short = f"{hour:02d}:{minute:02d}", f"{(hour + 11) % 12 + 1}:{minute:02d} {'AM' if hour < 12 else 'PM'}"
    if rng.random() < 0.5:
        question = rng.choice(("Write {t} as 12-hour time.", "Convert {t} to AM or PM time.", "{t} in 12-hour form"))
        return question.format(t=long), short, [short], f"time:{long}"
    question = rng.choice(("Write {t} as 24-hour time.", "Convert {t} to 24-hour time.", "{t} in 24-hour form"))
    return question.format(t=short), long, [long], f"time:{long}"


def make_convert(rng: random.Random, single: bool) -> Sample:
    """One conversion question with a one-line answer."""
    makers = (_unit, _iso, _twelve_hours) if single else (_unit, _unit, _iso, _weekday, _twelve_hours)
    question, answer, must, key = rng.choice(makers)(rng)
    return Sample(
        "convert",
        maybe_system(rng, 0.15) + [user(roughen(rng, question))],
        answer,
        {"kind": "text", "must": must},
        (key,),
    )
