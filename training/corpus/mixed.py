"""Conversations that change their subject: questions of several tasks, one after the other.

Without them a model takes the form of its last answer for the form of the next. Called by the registry with the
makers to draw from; a mixed conversation has the keys of all its parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from training.corpus.base import Sample, assistant, maybe_system

Maker = Callable[[random.Random, bool], Sample]


def make_mixed(rng: random.Random, makers: Sequence[Maker]) -> Sample:
    """Two to five questions, each from any of `makers`, none of which offers tools."""
    messages: list[dict[str, Any]] = maybe_system(rng, 0.1)
    keys: list[str] = []
    parts = [rng.choice(makers)(rng, True) for _ in range(rng.randint(2, 5))]
    for number, part in enumerate(parts):
        if number:
            messages.append(assistant(parts[number - 1].answer))
        assert part.tools is None, "tools are offered for a whole conversation"
        messages += [message for message in part.messages if message["role"] != "system"]
        keys += part.keys
    return Sample("mixed", messages, parts[-1].answer, parts[-1].check, tuple(keys))
