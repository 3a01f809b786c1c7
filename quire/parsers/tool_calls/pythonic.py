"""Llama 3.2 and 4 as Python: [name(key=value, ...), ...], whose values are literals. Nothing is evaluated."""

from __future__ import annotations

import re
from typing import Any

from quire.parsers.base import ToolCallParser
from quire.parsers.call_object import MAX_NAME_CHARS
from quire.parsers.reader import Markers, Reader, Steps
from quire.parsers.tools import encode

NAME_RUN = re.compile(r"[\w.]*")
IDENTIFIER = re.compile(r"[^\W\d]\w*")
NUMBER_RUN = re.compile(r"[-+.0-9eE_]*")
INTEGER = re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*)")
FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
STRING_RUN = re.compile(r"[^'\"\\\n]*")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
ESCAPES |= {"\\": "\\", "'": "'", '"': '"'}
HEX_CHARS = {"x": 2, "u": 4, "U": 8}
HEX_RUN = re.compile(r"[0-9a-fA-F]*")
MAX_DEPTH = 32
MAX_NUMBER_CHARS = 128
MAX_RUN = 1 << 20


class _BrokenError(Exception):
    """The text is no call, or no literal, from here on."""


class PythonicParser(ToolCallParser):
    """A list of calls that is the beginning of the answer; each is emitted when its bracket has closed."""

    opener, closer = "<|python_start|>", "<|python_end|>"

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        yield from reader.skip(self.opener)
        yield from reader.skip_spaces()
        if (yield from reader.skip("[")) and (yield from self._calls()):
            yield from reader.skip_spaces()
            yield from reader.skip(self.closer)
        else:
            out.content(reader.kept())
        reader.drop()
        yield from reader.forward_rest(out.content)

    def _calls(self) -> Steps[bool]:
        """Calls up to the end of the list; False when one is broken, whose text is what is kept."""
        reader, out = self.reader, self.out
        while True:
            yield from reader.skip_spaces()
            try:
                name, arguments = yield from self._call()
            except _BrokenError:
                return False
            out.begin(name)
            out.arguments(encode(arguments))
            out.end()
            reader.keep()
            yield from reader.skip_spaces()
            has_comma = yield from reader.skip(",")
            yield from reader.skip_spaces()
            if (yield from reader.skip("]")):
                return True
            if not has_comma:
                return False

    def _call(self) -> Steps[tuple[str, dict[str, Any]]]:
        name = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
        yield from self.reader.skip_spaces()
        if not self.tools.allows(name) or not (yield from self.reader.skip("(")):
            raise _BrokenError
        arguments: dict[str, Any] = {}
        while True:
            yield from self.reader.skip_spaces()
            if (yield from self.reader.skip(")")):
                return name, arguments
            key = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
            yield from self.reader.skip_spaces()
            if not IDENTIFIER.fullmatch(key) or key in arguments or not (yield from self.reader.skip("=")):
                raise _BrokenError
            arguments[key] = yield from Literal(self.reader).read()
            yield from self.reader.skip_spaces()
            if not (yield from self.reader.skip(",")):
                if not (yield from self.reader.skip(")")):
                    raise _BrokenError
                return name, arguments


class Lfm2Parser(PythonicParser):
    """LFM2: such a list between two tags, anywhere."""

    opener, closer = "<|tool_call_start|>", "<|tool_call_end|>"
    needs_special_tokens = True

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        while marker := (yield from reader.forward(out.content, Markers(self.opener))):
            reader.keep(len(marker))
            if (yield from self._block()):
                yield from reader.skip_spaces()
                yield from reader.skip(self.closer)
            else:
                out.content(reader.kept())
            reader.drop()

    def _block(self) -> Steps[bool]:
        """What stands between the tags; False when it is broken."""
        yield from self.reader.skip_spaces()
        return bool((yield from self.reader.skip("["))) and (yield from self._calls())


class Olmo3Parser(Lfm2Parser):
    """OLMo 3: each call on a line of its own, without the brackets of a list."""

    opener, closer = "<function_calls>", "</function_calls>"
    needs_special_tokens = False
    marks = (opener, closer)

    def _block(self) -> Steps[bool]:
        """As in `Lfm2Parser`."""
        reader, out = self.reader, self.out
        while True:
            yield from reader.skip_spaces()
            if (yield from reader.peek()) == "<":
                return True
            try:
                name, arguments = yield from self._call()
            except _BrokenError:
                return False
            out.begin(name)
            out.arguments(encode(arguments))
            out.end()
            reader.keep()


class Literal:
    """Reads one Python literal."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, depth: int = 0) -> Steps[Any]:
        """The value; `_BrokenError` when it is none."""
        reader = self._reader
        yield from reader.skip_spaces()
        char = yield from reader.peek()
        if not char or depth > MAX_DEPTH:
            raise _BrokenError
        if char in "'\"":
            return (yield from self._string())
        if char in "[(":
            reader.pos += 1
            return (yield from self._items("]" if char == "[" else ")", depth))
        if char == "{":
            reader.pos += 1
            return (yield from self._entries(depth))
        if char in "-+.0123456789":
            return _number((yield from reader.run(NUMBER_RUN, MAX_NUMBER_CHARS)))
        word = yield from reader.run(NAME_RUN, MAX_NAME_CHARS)
        if word not in WORDS:
            raise _BrokenError
        return WORDS[word]

    def _items(self, closer: str, depth: int) -> Steps[list[Any]]:
        items: list[Any] = []
        while not (yield from self._closes(closer)):
            items.append((yield from self.read(depth + 1)))
            yield from self._comma(closer)
        return items

    def _entries(self, depth: int) -> Steps[dict[str, Any]]:
        entries: dict[str, Any] = {}
        while not (yield from self._closes("}")):
            key = yield from self.read(depth + 1)
            yield from self._reader.skip_spaces()
            if not isinstance(key, str) or not (yield from self._reader.skip(":")):
                raise _BrokenError
            entries[key] = yield from self.read(depth + 1)
            yield from self._comma("}")
        return entries

    def _closes(self, closer: str) -> Steps[bool]:
        yield from self._reader.skip_spaces()
        return bool((yield from self._reader.skip(closer)))

    def _comma(self, closer: str) -> Steps[None]:
        """A comma, or the closer ahead."""
        yield from self._reader.skip_spaces()
        if not (yield from self._reader.skip(",")) and (yield from self._reader.peek()) != closer:
            raise _BrokenError

    def _string(self) -> Steps[str]:
        reader = self._reader
        quote = yield from reader.skip("'''", '"""', "''", '""', "'", '"')
        if len(quote) == 2:
            return ""
        parts: list[str] = []
        while True:
            parts.append((yield from reader.run(STRING_RUN, MAX_RUN)))
            if (yield from reader.skip(quote)):
                return "".join(parts)
            char = yield from reader.peek()
            if not char or (char == "\n" and len(quote) == 1):
                raise _BrokenError
            reader.pos += 1
            parts.append((yield from self._escape()) if char == "\\" else char)

    def _escape(self) -> Steps[str]:
        """The character that follows a backslash means; both of them when it means none."""
        char = yield from self._reader.peek()
        if not char:
            raise _BrokenError
        self._reader.pos += 1
        if char not in HEX_CHARS:
            return ESCAPES.get(char, "\\" + char)
        digits = yield from self._reader.run(HEX_RUN, HEX_CHARS[char])
        if len(digits) < HEX_CHARS[char] or int(digits, 16) > 0x10FFFF:
            raise _BrokenError
        return chr(int(digits, 16))


def _number(text: str) -> int | float:
    if INTEGER.fullmatch(text):
        return int(text)
    if not FLOAT.fullmatch(text) or float(text) in (float("inf"), -float("inf")):
        raise _BrokenError
    return float(text)
