"""JSON calls between two tags: InternLM, Jamba and Hunyuan A13B, LongCat; after a word: Phi-4-mini."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from quire.parsers.call_object import JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps


class TaggedJsonParser(JsonCallParser):
    """Subclassed with the tags of a format; between them an object, or a list of objects.

    Attributes:
        opener, closer: the tags.
        is_list: calls are written as a list.
        key: of the arguments, as they are written.
    """

    opener: ClassVar[str]
    closer: ClassVar[str]
    is_list: ClassVar[bool] = False
    key: ClassVar[str] = "arguments"

    def __init_subclass__(cls) -> None:
        cls.marks = (cls.opener, cls.closer)

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, openers, closers = self.reader, Markers(self.opener), Markers(self.closer)
        while marker := (yield from reader.forward(self.out.content, openers)):
            reader.keep(len(marker))
            yield from reader.skip_spaces()
            is_list = (yield from reader.peek()) == "["
            found = yield from (self.call_list() if is_list else self.call_object())
            yield from self.settle(found, closers)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call(cls.key)
        if cls.is_list:
            return CallSyntax(
                begin=f"{cls.opener}[", head=head, middle=middle, tail=tail, separator=", ", end=f"]{cls.closer}",
                openers=(cls.opener,),
            )  # fmt: skip
        return CallSyntax(
            head=f"{cls.opener}\n{head}", middle=middle, tail=f"{tail}\n{cls.closer}", separator="\n",
            openers=(cls.opener,),
        )  # fmt: skip


class JambaParser(TaggedJsonParser):
    """Jamba and Hunyuan A13B."""

    opener, closer = "<tool_calls>", "</tool_calls>"
    is_list = True


class LongCatParser(TaggedJsonParser):
    """LongCat-Flash."""

    opener, closer = "<longcat_tool_call>", "</longcat_tool_call>"


class InternLmParser(TaggedJsonParser):
    """InternLM 2.5 and 3."""

    opener, closer = "<|action_start|><|plugin|>", "<|action_end|>"
    key = "parameters"
    needs_special_tokens = True


class Phi4MiniParser(JsonCallParser):
    """functools[{"name": ..., "arguments": {...}}, ...], with nothing after it."""

    opener = Markers("functools[")

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, self.opener)):
            self.reader.keep(len(marker))
            self.reader.pos -= 1
            found = yield from self.call_list()
            yield from self.settle(found)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call()
        return CallSyntax(
            begin=cls.opener.texts[0], head=head, middle=middle, tail=tail, separator=", ", end="]",
            openers=cls.opener.texts,
        )  # fmt: skip
