"""Harmony, which gpt-oss writes: messages in channels. analysis is reasoning, commentary to=functions.x a call."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.base import ToolCallParser
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.json_text import JsonText
from quire.parsers.reader import Markers, Sink, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
BEGIN = Markers(START, CHANNEL)
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MESSAGE_END = Markers(*ENDS, START, CHANNEL)
HEADER_RUN = re.compile(r"[^<]*")
MAX_HEADER_CHARS = 512
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
FUNCTIONS = "functions."


class HarmonyParser(ToolCallParser):
    """Thinking, calls and answer, by the heads of the messages."""

    needs_special_tokens = True
    has_reasoning = True

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        opened = yield from reader.skip(START, CHANNEL, "to=")
        while True:
            if opened:
                header = yield from self._header(opened)
                if header is None:
                    out.content(reader.kept())
                else:
                    yield from self._message(header)
            else:
                out.content(reader.kept())
            opened = yield from reader.forward(out.content, BEGIN)
            if not opened:
                return
            reader.keep(len(opened))

    def _header(self, opened: str) -> Steps[str | None]:
        """What stands before the text of a message; None when no text follows."""
        parts = [opened]
        left = MAX_HEADER_CHARS
        while left:
            run = yield from self.reader.run(HEADER_RUN, left)
            left -= len(run)
            mark = yield from self.reader.skip(MESSAGE, CHANNEL, CONSTRAIN)
            if mark == MESSAGE:
                return "".join([*parts, run])
            if not mark:
                break
            parts += (run, mark)
            left = max(left - len(mark), 0)
        return None

    def _message(self, header: str) -> Steps[None]:
        reader, out = self.reader, self.out
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix(FUNCTIONS)
            yield from self._call(name if name != recipient[1] else "")
            return
        reader.drop()
        if channel is not None and channel[1] == "analysis":
            out.trim()
            self.is_inside = True
            yield from self._text(out.reasoning)
            self.is_inside = False
            out.trim()
        else:
            yield from self._text(out.content)

    def _text(self, sink: Sink) -> Steps[str]:
        """Text up to its end, which is read if it is a mark of its own."""
        marker = yield from self.reader.forward(sink, MESSAGE_END)
        if marker in (START, CHANNEL):
            self.reader.pos -= len(marker)
            return ""
        return marker

    def _call(self, name: str) -> Steps[None]:
        reader, out = self.reader, self.out
        yield from reader.skip_spaces()
        if not self.tools.allows(name) or (yield from reader.peek()) != "{":
            out.content(reader.kept())
            out.content((yield from self._text(out.content)))
            return
        out.begin(name)
        if (yield from JsonText(reader, out.arguments).read()):
            reader.drop()
            out.end()
            yield from reader.skip_spaces()
            yield from reader.skip(*ENDS)
        elif out.buffers_tool_calls:
            out.fail(reader.kept())
            out.content((yield from self._text(out.content)))
        else:
            reader.drop()
            yield from self._text(out.arguments)
            out.end()

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        middle = f" {CONSTRAIN}json{MESSAGE}"
        return CallSyntax(
            head=f"{CHANNEL}commentary to={FUNCTIONS}", middle=middle, tail="", has_several=False,
            reasoning=(f"{CHANNEL}analysis{MESSAGE}", f"{ENDS[0]}{START}assistant"),
        )  # fmt: skip
