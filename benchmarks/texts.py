"""Texts of several kinds, as pairs of a prompt and what follows it: what drafts from history can guess differs by kind.

Imported by the benchmark of speculation. Prose is that of this repository's documents, code is the standard
library's, the rest is made. Functions of a random generator; the same seed gives the same texts.
"""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path

Pair = tuple[str, str]

DOCS = Path(__file__).parent.parent / "docs"
FIRST_NAMES = ("Ada", "Alan", "Barbara", "Edsger", "Frances", "Grace", "Hedy", "John", "Katherine", "Linus", "Margaret")
LAST_NAMES = ("Allen", "Backus", "Dijkstra", "Hamilton", "Hopper", "Johnson", "Lamarr", "Liskov", "Lovelace", "Turing")
CITIES = ("Amsterdam", "Boston", "Cambridge", "Delft", "Edinburgh", "Geneva", "Helsinki", "London", "Oslo", "Vienna")
JOBS = ("analyst", "chemist", "editor", "engineer", "librarian", "pilot", "surveyor", "teacher", "translator")
ANIMALS = (
    "bear",
    "bird",
    "cat",
    "crow",
    "dog",
    "duck",
    "fox",
    "frog",
    "goat",
    "hen",
    "horse",
    "mouse",
    "owl",
    "rabbit",
)
PLACES = ("by the sea", "in a garden", "in a small town", "in the forest", "in the snow", "near the river", "on a farm")
TOOLS = [
    {"name": "find_trains", "parameters": {"origin": "string", "destination": "string", "date": "string"}},
    {"name": "get_weather", "parameters": {"city": "string", "date": "string"}},
]


@cache
def paragraphs() -> tuple[str, ...]:
    """Paragraphs of prose."""
    found: list[str] = []
    for path in sorted(DOCS.rglob("*.md")):
        parts = path.read_text().split("\n\n")
        found += [
            " ".join(part.split())
            for part in parts
            if len(part) > 200 and not re.search(r"^[|#`-]", part, re.MULTILINE)
        ]
    return tuple(found)


@cache
def modules() -> tuple[tuple[str, ...], ...]:
    """Lines of modules of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [tuple(path.read_text(errors="replace").splitlines()) for path in paths]
    return tuple(one for one in lines if len(one) > 200)


def prose(rng: random.Random, size: int) -> Pair:
    """The beginning of a text and how it goes on."""
    all_of_them = paragraphs()
    first = rng.randrange(len(all_of_them))
    texts = [all_of_them[(first + i) % len(all_of_them)] for i in range(2 + size // 100)]
    text = "\n\n".join(texts)
    return text[: size // 2], text[size // 2 :]


def story_prompt(rng: random.Random) -> str:
    """A wish for a story."""
    who, where = rng.choice(ANIMALS), rng.choice(PLACES)
    return f"Tell me a short story about {rng.choice(FIRST_NAMES)} and a {who} {where}."


def code(rng: random.Random, size: int) -> Pair:
    """The beginning of a module and how it goes on."""
    module = rng.choice(modules())
    text = "\n".join(module[rng.randrange(len(module) - 100) :])
    while len(text) < 2 * size:
        text += "\n".join(rng.choice(modules()))
    return text[: size // 2], text[size // 2 : 2 * size]


def code_edit(rng: random.Random, size: int) -> Pair:
    """A piece of code, and the same with a name changed and some lines new, gone or moved."""
    lines: list[str] = []
    while sum(map(len, lines)) < size:
        module = rng.choice(modules())
        first = rng.randrange(len(module) - 100)
        lines += [line for line in module[first : first + 60] if line.isascii() and line.strip()]
    ends = accumulate(map(len, lines))
    lines = lines[: 1 + sum(end < size for end in ends)]
    names = re.findall(r"\b[a-z_]{4,}\b", "\n".join(lines)) or ["return"]
    old = max(sorted(set(names)), key=names.count)
    edited = []
    for number, line in enumerate(lines):
        if number % 14 == 5:
            edited.append(f"{line[: len(line) - len(line.lstrip())]}# {rng.choice(JOBS)} {rng.randrange(1000)}")
        if number % 14 != 11:
            edited.append(re.sub(rf"\b{old}\b", f"{old}_{rng.choice(CITIES).lower()}", line))
    source = "\n".join(lines)
    return f"Rename {old}, and return the file:\n\n{source}\n\nHere it is:\n\n", "\n".join(edited)


def json_extraction(rng: random.Random, size: int) -> Pair:
    """Notes about people, and a list of objects with what they say."""
    notes, found = [], []
    while len(" ".join(notes)) < size:
        name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        city, job, year = rng.choice(CITIES), rng.choice(JOBS), rng.randrange(1900, 2000)
        notes.append(f"{name}, born in {year}, moved to {city} to work as {job}.")
        found.append({"name": name, "year_of_birth": year, "city": city, "occupation": job, "is_verified": False})
    return f"Extract a JSON list.\n\n{' '.join(notes)}\n\n", json.dumps(found, indent=2)


def repetition(rng: random.Random, size: int) -> Pair:
    """A text to be said again, word for word."""
    text = " ".join(rng.choice(paragraphs()) for _ in range(1 + size // 300))[:size]
    return f"Repeat this, several times:\n\n{text}\n\n", "\n\n".join([text] * 3)


def chat_with_tools(rng: random.Random, size: int) -> Pair:
    """A conversation with calls of tools, and its next turns."""
    turns = [f"<|system|>{json.dumps(TOOLS)}"]
    while sum(map(len, turns)) < 3 * size:
        origin, destination = rng.sample(CITIES, 2)
        date = f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        leaves, price = f"{rng.randrange(6, 22):02}:{rng.randrange(60):02}", rng.randrange(20, 200)
        call = {"name": "find_trains", "arguments": {"origin": origin, "destination": destination, "date": date}}
        turns += [
            f"<|user|>I am in {origin} and have to be in {destination} on {date}. What is the first train?",
            f"<|assistant|><tool_call>\n{json.dumps(call)}\n</tool_call>",
            f'<|tool|>{{"origin": "{origin}", "destination": "{destination}", "leaves": "{leaves}", "price": {price}}}',
            f"<|assistant|>The first train from {origin} to {destination} leaves at {leaves} and costs {price} euros.",
        ]
    text, at = "\n".join(turns), 0
    while at < size:
        at = text.index("<|assistant|>", at + 1)
    return text[:at], text[at:]


KINDS: dict[str, Callable[[random.Random, int], Pair]] = {
    "prose": prose,
    "code": code,
    "code edit": code_edit,
    "JSON extraction": json_extraction,
    "repetition": repetition,
    "chat with tools": chat_with_tools,
}
