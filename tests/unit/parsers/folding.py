"""What the events of an answer come to, and the tools that the tests' answers call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.parsers.base import AnswerParser
from quire.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from quire.parsers.tools import Tools
from tests.effort import effort

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": TEXT, "unit": {"enum": ["C", "F"]}, "days": NUMBER},
    "search": {"query": TEXT, "limit": NUMBER, "exact": {"type": "boolean"}, "since": {"type": ["string", "null"]}},
    "write_file": {"path": TEXT, "content": TEXT},
    "plot": {
        "points": {"type": "array"}, "style": {"type": "object"}, "scale": {"type": "number"}, "id": TEXT,
        "tag": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "now": {},
}  # fmt: skip
TOOLS = Tools(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in PARAMETERS.items()
    ]
)


@dataclass
class Answer:
    """Content, thinking, and calls as (name, JSON text of the arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Answer:
    answer = Answer()
    is_open = False
    for event in events:
        if isinstance(event, Content):
            assert event.text
            answer.content += event.text
        elif isinstance(event, Reasoning):
            assert event.text
            answer.reasoning += event.text
        elif isinstance(event, CallBegin):
            answer.calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments) and event.text and is_open, "arguments follow their call at once"
            name, text = answer.calls[-1]
            answer.calls[-1] = (name, text + event.text)
        is_open = isinstance(event, CallBegin | CallArguments)
    return answer


def read(parser: AnswerParser, parts: Iterable[str]) -> Answer:
    events = [event for part in parts for event in parser.push(part)]
    return fold(events + parser.finish())


LONG, EVERY = effort((40, 5), (80, 3))
"""A text of more than so many characters is cut in two at every so manieth place only, as most of it is alike."""


def splits(text: str, num_random: int = 3, *, in_two: bool = True) -> Iterable[list[str]]:
    """Every way to cut `text` in two, every character alone, and some random ways."""
    for cut in range(1, len(text), EVERY if len(text) > LONG else 1) if in_two else ():
        yield [text[:cut], text[cut:]]
    yield list(text)
    rng = random.Random(len(text))
    for _ in range(num_random):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(2, 9))))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_splits(make: Callable[[], AnswerParser], texts: Sequence[str], *, in_two: bool = True) -> None:
    """However it is cut, an answer is read as when it comes whole."""
    for text in texts:
        whole = read(make(), [text])
        for parts in splits(text, in_two=in_two):
            assert read(make(), parts) == whole, (text, parts)
