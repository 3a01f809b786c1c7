"""Qwen3: reasoning in <think>; the model may go on to a call without </think>."""

from __future__ import annotations

from quire.parsers.reasoning.tags import TagParser


class Qwen3ReasoningParser(TagParser):
    """<tool_call> ends the reasoning where a call may follow it, not where the model only mentions it."""

    call_marks = ("<tool_call>",)
    call_heads = ("\n", "{", "<function=")
    marks = (*TagParser.marks, *call_marks)
