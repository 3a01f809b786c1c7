"""A tracker of bytes stands where the parser of the text does, in every format with delimiters, however it is cut."""

from __future__ import annotations

import random

import pytest

from quire.core.reasoning import ReasoningPosition, ReasoningTracker
from quire.parsers.base import ReasoningParser
from quire.parsers.reasoning_format import delimiters_of
from quire.parsers.registry import REASONING_PARSERS
from tests.effort import effort

KINDS = {kind.__name__: kind for kind in REASONING_PARSERS.values() if kind.starts is not None}


def random_parts(kind: type[ReasoningParser], rng: random.Random) -> list[str]:
    """Text in which delimiters, calls, and parts of them, are frequent, cut anywhere."""
    assert kind.starts is not None and kind.ends is not None
    marks = [*kind.starts.texts, *kind.ends.texts, *kind.call_marks]
    words = [*marks, *kind.call_heads, *(mark[: rng.randint(1, len(mark))] for mark in marks), " ", "\n", "é", "a", "<"]
    text = "".join(rng.choice(words) for _ in range(rng.randint(1, 10)))
    parts = []
    while text:
        size = rng.choice((0, 1, 2, 5, 20))
        parts.append(text[:size])
        text = text[size:]
    return parts


@pytest.mark.parametrize("waits_for_end", [False, True], ids=["calls-end-it", "waits"])
@pytest.mark.parametrize("name", KINDS)
def test_a_tracker_and_the_parser_agree_after_every_part(name: str, waits_for_end: bool):
    kind = KINDS[name]
    assert kind.starts is not None and kind.ends is not None
    for seed in range(effort(100, 3000)):
        rng = random.Random(seed)
        parser = kind(rng.choice(("", kind.starts.texts[0], kind.ends.texts[-1])))
        parser.waits_for_end = waits_for_end
        delimiters = delimiters_of(parser)
        assert delimiters is not None
        tracker, num_inside = ReasoningTracker(delimiters), 0
        for part in random_parts(kind, rng):
            was_inside = parser.is_inside
            parser.push(part)
            tracker.push(part.encode())
            num_inside += was_inside and parser.is_inside
            assert (tracker.place is ReasoningPosition.INSIDE) == parser.is_inside, seed
            assert tracker.num_tokens == num_inside - parser.has_redundant_start_tag, seed
