"""Granite 3.2: the reasoning and the answer are each announced by a sentence."""

from __future__ import annotations

from quire.parsers.reader import Markers
from quire.parsers.reasoning.tags import TagParser


class GraniteReasoningParser(TagParser):
    """Both sentences in either spelling."""

    starts = Markers("Here is my thought process:", "Here's my thought process:")
    ends = Markers("Here is my response:", "Here's my response:")
