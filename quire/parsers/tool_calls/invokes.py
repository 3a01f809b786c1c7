"""Calls as <invoke name="name"><parameter name="key">value</parameter></invoke>, in the tags of three families."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from quire.parsers.call_syntax import CallSyntax, ParameterMarks
from quire.parsers.marked_calls import CallMarks, MarkedCallParser


class MiniMaxM2Parser(MarkedCallParser):
    """MiniMax M2: all calls within one <minimax:tool_call>."""

    form = CallMarks(
        openers=("<minimax:tool_call>",), call="<invoke name=", name_end=">", parameter="<parameter name=",
        key_ends=(">",), value_end="</parameter>", call_end="</invoke>", closers=("</minimax:tool_call>",),
    )  # fmt: skip
    marks = (*form.openers, *form.closers)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        form = cls.form
        return CallSyntax(
            begin=f"{form.openers[0]}\n", head=f'{form.call}"', middle='">\n', tail=f"{form.call_end}\n",
            end=form.closers[0], openers=(form.openers[0], form.call), parameters=cls.parameter_marks('">'),
        )  # fmt: skip


class DeepSeekV32Parser(MiniMaxM2Parser):
    """DeepSeek V3.2: DSML, in which each parameter says whether it is a text (string="true") or JSON ("false")."""

    form = CallMarks(
        openers=("<｜DSML｜function_calls>",), call="<｜DSML｜invoke name=", name_end=">",
        parameter="<｜DSML｜parameter name=", key_ends=(">",), value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>", closers=("</｜DSML｜function_calls>",),
    )  # fmt: skip
    needs_special_tokens = True
    marks = ()

    @classmethod
    def parameter_marks(cls, middle: str = "", tail: str = "") -> ParameterMarks:
        """As `MarkedCallParser.parameter_marks`."""
        marks = super().parameter_marks('" string="true">', tail)
        return replace(marks, json_middle='" string="false">')


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: DSML under another name of the block."""

    form = replace(DeepSeekV32Parser.form, openers=("<｜DSML｜tool_calls>",), closers=("</｜DSML｜tool_calls>",))


class Step3Parser(MarkedCallParser):
    """Step 3: each call within control tokens of its own."""

    form = CallMarks(
        openers=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"), kind="function<｜tool_sep｜>",
        call="<steptml:invoke name=", name_end=">", parameter="<steptml:parameter name=", key_ends=(">",),
        value_end="</steptml:parameter>", call_end="</steptml:invoke>",
        closers=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    )  # fmt: skip
    needs_special_tokens = True

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        form = cls.form
        block, opener = form.openers
        return CallSyntax(
            begin=f"{block}\n", head=f'{opener}{form.kind}{form.call}"', middle='">\n',
            tail=f"{form.call_end}{form.closers[0]}\n", end=form.closers[1], openers=(*form.openers, form.call),
            parameters=cls.parameter_marks('">'),
        )  # fmt: skip
