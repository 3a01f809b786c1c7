"""JSON text, checked while it is read (RFC 8259). Used by the parsers of formats that write JSON; no state."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.parsers.reader import SPACE_RUN, SPACES, Reader, Sink, Steps

MAX_DEPTH = 128
MAX_NUMBER_CHARS = 512
MAX_KEPT_CHARS = 1 << 16
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
WORD_RUN = re.compile(r"[a-z]*")
HEX_RUN = re.compile(r"[0-9a-fA-F]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
ESCAPES = '"\\/bfnrtu'
RUN_CHARS = 1 << 12


class _BrokenError(Exception):
    """The text is not JSON from here on, or is too long."""


class JsonText:
    """Reads one JSON value.

    Args:
        reader: at the value.
        sink: gets the text as it is read.
        max_chars: a longer value is broken; None = any length.
    """

    def __init__(self, reader: Reader, sink: Sink, max_chars: int | None = None) -> None:
        self._reader = reader
        self._sink = sink
        self._left = max_chars

    def read(self, opening: str = "") -> Steps[bool]:
        """Read the value; False when it is broken, or the text ends in it: what was read of it is in `sink`.

        Args:
            opening: of an object, its brace and white space, where it was read before.
        """
        try:
            yield from self._value(opening)
        except _BrokenError:
            return False
        return True

    def _value(self, opening: str) -> Steps[None]:
        """A value; objects and arrays that are open are on a stack, not in recursion."""
        closers: list[str] = []
        if opening:
            self._sink(opening)
        is_opened = bool(opening)
        while True:
            opened = yield from (self._inside("}", closers) if is_opened else self._begin(closers))
            is_opened = False
            if opened:
                continue
            while closers:  # after a value
                yield from self._spaces()
                char = yield from self._reader.peek()
                if char == ",":
                    self._take(1)
                    yield from self._spaces()
                    if closers[-1] == "}":
                        yield from self._key()
                    break
                if char != closers[-1]:
                    raise _BrokenError
                self._take(1)
                closers.pop()
            else:
                return

    def _begin(self, closers: list[str]) -> Steps[bool]:
        """A scalar or an empty container, or the opening of one; True when one was opened."""
        char = yield from self._reader.peek()
        if char == '"':
            yield from self._string()
        elif char and char in "{[":
            if len(closers) == MAX_DEPTH:
                raise _BrokenError
            self._take(1)
            return (yield from self._inside("}" if char == "{" else "]", closers))
        elif char and char in "-0123456789":
            yield from self._whole_run(NUMBER_RUN, MAX_NUMBER_CHARS, lambda text: NUMBER.fullmatch(text) is not None)
        else:
            yield from self._whole_run(WORD_RUN, 6, ("true", "false", "null").__contains__)
        return False

    def _inside(self, closer: str, closers: list[str]) -> Steps[bool]:
        """What follows the bracket that opens a container; False when it is empty."""
        yield from self._spaces()
        if (yield from self._reader.peek()) == closer:
            self._take(1)
            return False
        if closer == "}":
            yield from self._key()
        closers.append(closer)
        return True

    def _key(self) -> Steps[None]:
        yield from self._string()
        yield from self._spaces()
        if (yield from self._reader.peek()) != ":":
            raise _BrokenError
        self._take(1)
        yield from self._spaces()

    def _string(self) -> Steps[None]:
        if (yield from self._reader.peek()) != '"':
            raise _BrokenError
        self._take(1)
        while True:
            yield from self._run(STRING_RUN)
            char = yield from self._reader.peek()
            if char == '"':
                self._take(1)
                return
            if char != "\\":
                raise _BrokenError
            self._take(1)
            escape = yield from self._reader.peek()
            if not escape or escape not in ESCAPES:
                raise _BrokenError
            self._take(1)
            if escape == "u":
                for _ in range(4):
                    digit = yield from self._reader.peek()
                    if not digit or not HEX_RUN.fullmatch(digit):
                        raise _BrokenError
                    self._take(1)

    def _spaces(self) -> Steps[None]:
        char = yield from self._reader.peek()
        if char and char in SPACES:
            yield from self._run(SPACE_RUN)

    def _run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Characters of one class, emitted as they come."""
        reader = self._reader
        while True:
            limit = RUN_CHARS if self._left is None else min(RUN_CHARS, self._left)
            match = pattern.match(reader.text, reader.pos, reader.pos + limit)
            assert match is not None, "a repeated class fits the empty text"
            self._take(len(match[0]))
            if reader.pos < len(reader.text):
                if len(match[0]) < limit:
                    return
            elif reader.is_over:
                return
            else:
                yield

    def _whole_run(self, pattern: re.Pattern[str], limit: int, is_valid: Callable[[str], bool]) -> Steps[None]:
        """A number or a word."""
        if self._left is not None:
            limit = min(limit, self._left)
            self._left -= limit
        text = yield from self._reader.run(pattern, limit)
        self._sink(text)
        if self._left is not None:
            self._left += limit - len(text)
        if not is_valid(text):
            raise _BrokenError

    def _take(self, num_chars: int) -> None:
        """Read so many characters, which are there."""
        if self._left is not None:
            if not self._left:
                raise _BrokenError
            self._left -= num_chars
        reader = self._reader
        self._sink(reader.text[reader.pos : reader.pos + num_chars])
        reader.pos += num_chars


def short_string(reader: Reader, max_chars: int) -> Steps[str | None]:
    """Read a JSON text of at most `max_chars` characters; its value, None when it is broken."""
    parts: list[str] = []
    is_text = (yield from reader.peek()) == '"'
    if not is_text or not (yield from JsonText(reader, parts.append, max_chars + 2).read()):
        return None
    value = json.loads("".join(parts))
    return value if isinstance(value, str) else None
