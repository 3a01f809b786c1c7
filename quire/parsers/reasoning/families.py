"""Thinking between two marks, as in `tags`, in the marks of families of models."""

from __future__ import annotations

from quire.parsers.reader import Markers
from quire.parsers.reasoning.deepseek_r1 import DeepSeekR1Parser
from quire.parsers.reasoning.tags import TagParser


class DeepSeekV3ReasoningParser(TagParser):
    """DeepSeek V3.1, V3.2, V4: the prompt says whether there is reasoning; a block of calls ends it, too."""

    call_marks = ("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    marks = (*TagParser.marks, "<｜tool▁calls▁begin｜>", "｜DSML｜")


class KimiK2ReasoningParser(TagParser):
    """Kimi K2 Thinking: a section of calls ends the reasoning, too."""

    call_marks = ("<|tool_calls_section_begin|>",)
    marks = (*TagParser.marks, *call_marks)


class MiniMaxM2ReasoningParser(DeepSeekR1Parser):
    """MiniMax M2: the template begins the reasoning; a block of calls ends it, too."""

    call_marks = ("<minimax:tool_call>",)
    marks = (*TagParser.marks, *call_marks)


class SeedOssReasoningParser(TagParser):
    """Seed-OSS: <seed:think> and </seed:think>."""

    starts, ends = Markers("<seed:think>"), Markers("</seed:think>")
    call_marks = ("<seed:tool_call>",)
    marks = (*starts.texts, *ends.texts, *call_marks)


class MistralReasoningParser(TagParser):
    """Magistral and later: [THINK] and [/THINK], which are control tokens."""

    starts, ends = Markers("[THINK]"), Markers("[/THINK]")
    call_marks = ("[TOOL_CALLS]",)
    marks = (*starts.texts, *ends.texts, *call_marks)


class Gemma4ReasoningParser(TagParser):
    """Gemma 4: the channel `thought`, empty where the model does not think."""

    starts, ends = Markers("<|channel>thought"), Markers("<channel|>")
    call_marks = ("<|tool_call>",)
    needs_special_tokens = True
    marks = ("<|channel>", *ends.texts, *call_marks)
