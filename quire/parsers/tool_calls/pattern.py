"""A format of the operator's own: two marks, and a regular expression for what stands between them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from quire.errors import ConfigError, unknown_name
from quire.parsers.base import ToolCallParser
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.reader import Markers, Steps
from quire.parsers.tools import Tools, decode

KEYS = ("begin", "end", "pattern")
CALL, NAME, ARGUMENTS = "call", "{name}", "{arguments}"
MAX_CALL_CHARS = 1 << 16


class PatternFormat:
    """A checked description of such a format.

    Args:
        description: `begin`, `end` (texts) and `pattern` (a regular expression with the groups `name` and
            `arguments`, the latter JSON, that fits the whole text between them). Calls can be forced with `call`, such
            a text with {name} and then {arguments} in it.

    Raises:
        ConfigError: a part is missing, empty, unknown or no such expression.

    Attributes:
        needs_special_tokens, marks, has_reasoning, id_chars: of its parsers.
    """

    needs_special_tokens = True
    marks: tuple[str, ...] = ()
    has_reasoning = False
    id_chars = 0

    def __init__(self, description: Mapping[str, Any]) -> None:
        for key in description:
            if key not in (*KEYS, CALL):
                raise unknown_name("key of the tool call format", str(key), (*KEYS, CALL), ConfigError)
        for key in KEYS:
            if not isinstance(description.get(key), str) or not description[key]:
                raise ConfigError(
                    f"the tool call format lacks {key}", hint=f"it needs {', '.join(KEYS)}", field="tool_call_format"
                )
        self.begin = Markers(description["begin"])
        self.end = Markers(description["end"])
        try:
            self.pattern = re.compile(description["pattern"], re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"pattern of the tool call format is not a valid regular expression: {error}", field="tool_call_format"
            ) from None
        missing = {"name", "arguments"} - self.pattern.groupindex.keys()
        if missing:
            raise ConfigError(
                f"pattern of the tool call format lacks the group {sorted(missing)[0]}",
                hint="write (?P<name>...) and (?P<arguments>...)",
                field="tool_call_format",
            )

        self._syntax = self._checked_syntax(description.get(CALL))

    def syntax(self, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return self._syntax

    def _checked_syntax(self, call: Any) -> CallSyntax | None:
        """How a call is written; None when the description does not say."""
        if call is None:
            return None
        head, has_name, rest = (call if isinstance(call, str) else "").partition(NAME)
        middle, has_arguments, tail = rest.partition(ARGUMENTS)
        match = self.pattern.fullmatch(f"{head}f{middle}{{}}{tail}") if has_name and has_arguments else None
        if match is None or match["name"] != "f" or (match["arguments"] or "").strip() != "{}":
            raise ConfigError(
                "call of the tool call format does not match its own pattern",
                hint="write the text between begin and end, with {name} and after it {arguments}",
                field="tool_call_format",
            )
        begin, end = self.begin.texts[0], self.end.texts[0]
        return CallSyntax(head=begin + head, middle=middle, tail=tail + end, excludes=(end,), openers=(begin,))

    def __call__(self, tools: Tools, *, buffers_tool_calls: bool = False) -> PatternParser:
        """A parser of this format."""
        return PatternParser(self, tools, buffers_tool_calls=buffers_tool_calls)


class PatternParser(ToolCallParser):
    """Each call is emitted when its end has come."""

    needs_special_tokens = True

    def __init__(self, form: PatternFormat, tools: Tools, *, buffers_tool_calls: bool = False) -> None:
        self._form = form
        super().__init__(tools, buffers_tool_calls=buffers_tool_calls)

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, self._form.begin)):
            self.reader.keep(len(marker))
            parts: list[str] = []
            end = yield from self.reader.forward(parts.append, self._form.end)
            call = self._call("".join(parts)) if end else None
            if call is None:
                self.out.content(self.reader.kept())
                continue
            self.reader.drop()
            self.out.begin(call[0])
            self.out.arguments(call[1])
            self.out.end()

    def _call(self, text: str) -> tuple[str, str] | None:
        """The name and the JSON text of the arguments."""
        match = self._form.pattern.fullmatch(text) if len(text) <= MAX_CALL_CHARS else None
        if match is None or not self.tools.allows(match["name"] or ""):
            return None
        arguments = (match["arguments"] or "{}").strip()
        try:
            is_object = isinstance(decode(arguments), dict)
        except (ValueError, RecursionError):
            return None
        return (match["name"], arguments) if is_object else None
