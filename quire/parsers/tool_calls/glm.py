"""GLM 4.5 to 4.7: <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value> each, </tool_call>."""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_syntax import CallSyntax
from quire.parsers.marked_calls import CallMarks, MarkedCallParser


class Glm45Parser(MarkedCallParser):
    """GLM 4.5 and 4.6: each mark on a line of its own."""

    form = CallMarks(
        call="<tool_call>", name_end="", parameter="<arg_key>", key_ends=("</arg_key>", "<arg_value>"),
        value_end="</arg_value>", call_end="</tool_call>",
    )  # fmt: skip
    marks = (form.call, form.call_end, form.parameter, *form.key_ends, form.value_end)
    line = "\n"

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        form = cls.form
        return CallSyntax(
            head=form.call, middle=cls.line, tail=form.call_end, separator="\n", openers=(form.call,),
            parameters=cls.parameter_marks(cls.line.join(form.key_ends), form.value_end + cls.line),
        )  # fmt: skip


class Glm47Parser(Glm45Parser):
    """GLM 4.7 and 5: nothing between the marks. Either form is read by both."""

    line = ""
