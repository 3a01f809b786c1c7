"""DeepSeek R1: the answer begins inside the reasoning, which </think> ends."""

from __future__ import annotations

from quire.parsers.reasoning.tags import TagParser


class DeepSeekR1Parser(TagParser):
    """An answer without any mark is reasoning that was cut."""

    begins_inside = True
