"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, nothing quoted.

Seed-OSS writes the same within its own tags, and no line breaks around values.
"""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_syntax import CallSyntax
from quire.parsers.marked_calls import CallMarks, MarkedCallParser


class Qwen3CoderParser(MarkedCallParser):
    """The line breaks beside a value's marks are no part of it."""

    form = CallMarks(
        openers=("<tool_call>",), call="<function=", name_end=">", parameter="<parameter=", key_ends=(">",),
        value_end="</parameter>", call_end="</function>", closers=("</tool_call>",), strips_newline=True,
    )  # fmt: skip
    marks = (*form.openers, *form.closers)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        (opener,), (closer,) = cls.form.openers, cls.form.closers
        return CallSyntax(
            head=f"{opener}\n{cls.form.call}", middle=">\n", tail=f"{cls.form.call_end}\n{closer}", separator="\n",
            openers=(opener, cls.form.call), parameters=cls.parameter_marks(),
        )  # fmt: skip


class SeedOssParser(Qwen3CoderParser):
    """A value stands between its marks as it is."""

    form = CallMarks(
        openers=("<seed:tool_call>",), call="<function=", name_end=">", parameter="<parameter=", key_ends=(">",),
        value_end="</parameter>", call_end="</function>", closers=("</seed:tool_call>",),
    )  # fmt: skip
    marks = (*form.openers, *form.closers)
