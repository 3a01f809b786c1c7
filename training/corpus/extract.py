"""JSON extraction from a sentence or note (measured). Called by the registry.

A domain has fields with random values and sentences that mention them all; the
prompt names the wanted fields and the answer is one JSON object with them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from training.corpus import words
from training.corpus.base import Sample, assistant, maybe_system, system, user

Values = dict[str, Any]


def _price(rng: random.Random) -> float | int:
    return rng.randint(1, 99) if rng.random() < 0.5 else round(rng.randint(100, 9900) / 100 + 0.01, 2)


def _person(rng: random.Random) -> tuple[Values, str]:
    v = {"name": words.person(rng), "age": rng.randint(5, 95), "city": words.city(rng), "job": rng.choice(words.JOBS)}
    a = words.article(v["job"])
    return v, rng.choice(
        (
            "{name} is {age} years old and works as {a} in {city}.",
            "{name}, {age}, is {a} from {city}.",
            "My neighbor {name} is {a}. {name} is {age} and lives in {city}.",
            "This is {name} from {city}, {age} years old, {a} by trade.",
            "{name} ({age}) lives in {city} and is {a}.",
            "I met {a} in {city}. The name was {name}, age {age}.",
            "In {city} lives {a} named {name} who is {age}.",
        )
    ).format(a=a, **v)


def _order(rng: random.Random) -> tuple[Values, str]:
    v = {
        "customer": words.person(rng),
        "quantity": rng.randint(2, 60),
        "item": rng.choice(words.GOODS) + "s",
        "color": rng.choice(words.COLOURS),
        "day": rng.choice(words.DAYS),
    }
    if v["item"].endswith("fes") or v["item"] in ("brushs", "knifes", "mouses"):
        v["item"] = "lamps"
    return v, rng.choice(
        (
            "{customer} ordered {quantity} {color} {item} for {day}.",
            "Order: {quantity} {color} {item}, for {customer}, due {day}.",
            "Please send {quantity} {color} {item} to {customer} on {day}.",
            "On {day} {customer} wants {quantity} {color} {item}.",
            "Note: {customer} needs {quantity} {item} in {color} by {day}.",
            "{customer} called and asked for {quantity} {color} {item} on {day}.",
        )
    ).format(**v)


def _event(rng: random.Random) -> tuple[Values, str]:
    kind = rng.choice(
        ("meeting", "concert", "party", "lesson", "dinner", "lunch", "workshop", "game", "picnic", "talk")
    )
    v = {
        "event": kind,
        "city": words.city(rng),
        "day": rng.choice(words.DAYS),
        "time": f"{rng.randint(7, 22):02d}:{rng.choice((0, 15, 30, 45)):02d}",
        "guests": rng.randint(3, 90),
    }
    return v, rng.choice(
        (
            "The {event} is on {day} at {time} in {city} with {guests} guests.",
            "{day}, {time}: {event} in {city}, {guests} guests.",
            "We plan a {event} in {city} on {day} at {time} for {guests} guests.",
            "{guests} guests will come to the {event} in {city} on {day} at {time}.",
            "Do not forget the {event}! It starts at {time} on {day} in {city}. There will be {guests} guests.",
        )
    ).format(**v)


def _product(rng: random.Random) -> tuple[Values, str]:
    v = {
        "product": rng.choice(words.GOODS),
        "price": _price(rng),
        "color": rng.choice(words.COLOURS),
        "stock": rng.randint(2, 99),
    }
    return v, rng.choice(
        (
            "The {color} {product} costs {price} dollars and we have {stock} in stock.",
            "{product}, {color}, {price} dollars, {stock} left in stock.",
            "We have {stock} of the {color} {product} at {price} dollars each.",
            "For {price} dollars you get the {color} {product}. {stock} are in stock.",
            "Price of the {color} {product}: {price} dollars. Stock: {stock}.",
        )
    ).format(**v)


def _contact(rng: random.Random) -> tuple[Values, str]:
    first, last = words.person(rng), rng.choice(words.SURNAMES)
    v = {
        "first_name": first,
        "last_name": last,
        "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}",
        "email": f"{first.lower()}@{rng.choice(('mail', 'post', 'home', 'work'))}.{rng.choice(('com', 'org', 'net'))}",
    }
    return v, rng.choice(
        (
            "{first_name} {last_name}, phone {phone}, email {email}",
            "You can reach {first_name} {last_name} at {phone} or {email}.",
            "Contact: {first_name} {last_name}. Call {phone} or write to {email}.",
            "My name is {first_name} {last_name}. My number is {phone} and my email is {email}.",
            "Write to {email} or call {phone} and ask for {first_name} {last_name}.",
        )
    ).format(**v)


def _trip(rng: random.Random) -> tuple[Values, str]:
    start, end = rng.sample(words.CITIES, 2)
    v = {
        "from": start,
        "to": end,
        "passenger": words.person(rng),
        "month": rng.choice(words.MONTHS),
        "seats": rng.randint(1, 9),
    }
    s = "seat" if v["seats"] == 1 else "seats"
    return v, rng.choice(
        (
            "{passenger} travels from {from} to {to} in {month} and needs {seats} {s}.",
            "Trip in {month}: {from} to {to}, {seats} {s}, booked by {passenger}.",
            "Please book {seats} {s} from {from} to {to} in {month} for {passenger}.",
            "In {month}, {passenger} will leave {from} for {to} with {seats} {s}.",
        )
    ).format(s=s, **v)


def _pet(rng: random.Random) -> tuple[Values, str]:
    v = {
        "pet": rng.choice(words.NAMES),
        "animal": rng.choice(words.ANIMALS),
        "owner": words.person(rng),
        "age": rng.randint(1, 20),
        "vaccinated": rng.random() < 0.5,
    }
    status = "is vaccinated" if v["vaccinated"] else "is not vaccinated"
    return v, rng.choice(
        (
            "{pet} is a {age} year old {animal} owned by {owner} and {st}.",
            "{owner} has a {animal} named {pet}. {pet} is {age} and {st}.",
            "The {animal} {pet} belongs to {owner}, is {age} years old and {st}.",
        )
    ).format(st=status, **v)


_DOMAINS: tuple[Callable[[random.Random], tuple[Values, str]], ...] = (
    _person,
    _order,
    _event,
    _product,
    _contact,
    _trip,
    _pet,
)

_PROMPTS = (
    "Extract {f} as JSON: {t}",
    "Extract {f} from this text as JSON.\n\n{t}",
    "Give me {f} as a JSON object.\n{t}",
    "{t}\n\nExtract {f} as JSON.",
    "Text: {t}\nReturn JSON with the keys {f}.",
    "Read the note and return {f} in JSON.\nNote: {t}",
    "Turn this into JSON with {f}: {t}",
    "{t}\nGive {f} as JSON.",
    "Return a JSON object with {f}.\n\nText: {t}",
    "Find {f} in the text. Answer in JSON.\n\n{t}",
    "JSON with {f}, please:\n{t}",
    "extract {f} as json\n{t}",
    'From the sentence "{t}" extract {f} as JSON.',
)


def _field_list(rng: random.Random, fields: list[str]) -> str:
    r = rng.random()
    if r < 0.4:
        return words.join_and(fields)
    if r < 0.6:
        return ", ".join(fields)
    if r < 0.8:
        return words.join_and([f'"{f}"' for f in fields])
    if r < 0.9:
        return "the " + words.join_and(fields)
    return words.join_and([f"`{f}`" for f in fields])


def _fields(rng: random.Random, names: list[str]) -> list[str]:
    """Draws two or more fields, mostly in the order of the domain."""
    fields = rng.sample(names, rng.randint(2, len(names)))
    if rng.random() < 0.6:
        fields.sort(key=names.index)
    return fields


_AGAIN = ("Now extract {f}.", "And {f}?", "Now only {f}, as JSON.", "Please give me {f} too.", "The same with {f}.")


def make_extraction(rng: random.Random, single: bool) -> Sample:
    """One note, the wanted fields, one line of JSON; training may ask again for other fields."""
    domain = rng.choice(_DOMAINS)
    values, text = domain(rng)
    names = list(values)
    messages = maybe_system(rng, 0.15)
    if rng.random() < 0.05:
        messages = [system("Answer only with JSON.")]
    fields = _fields(rng, names)
    messages.append(user(rng.choice(_PROMPTS).format(f=_field_list(rng, fields), t=text)))
    result = {f: values[f] for f in fields}
    for _ in range(0 if single else rng.choice((0, 0, 1, 2))):
        fields = _fields(rng, names)
        messages += [
            assistant(json.dumps(result, ensure_ascii=False)),
            user(rng.choice(_AGAIN).format(f=_field_list(rng, fields))),
        ]
        result = {f: values[f] for f in fields}
    key = f"extract:{domain.__name__}:" + ":".join(str(values[n]) for n in names[:3])
    return Sample(
        "extraction", messages, json.dumps(result, ensure_ascii=False), {"kind": "json", "value": result}, (key,)
    )
