"""Calls whose arguments are marked one by one and not quoted, as in <parameter=key>value</parameter>.

Subclassed with the marks of a format. Values become JSON of the types that the tool's schema names; a string
is emitted as it comes. A parser of one answer owns no state but its reader's and its output's.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from quire.parsers.base import ToolCallParser
from quire.parsers.call_object import MAX_NAME_CHARS
from quire.parsers.call_syntax import ParameterMarks
from quire.parsers.reader import MAX_SPACES, SPACE_RUN, Markers, Sink, Steps
from quire.parsers.tools import encode, json_of

NAME_RUN = re.compile(r"[^<>\n]*")
QUOTES = "\"'"
KIND = re.compile(r"(.*?)\s+string=[\"']?(true|false)[\"']?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """The marks of a format.

    Attributes:
        call: begins a call; the function's name follows, in quotes or not.
        name_end: ends the name; "" = the next mark, perhaps on the next line.
        parameter: begins an argument; its key follows.
        key_ends: end the key, one after another.
        value_end: ends the value, which cannot hold it.
        call_end: ends the call.
        openers: may stand before a call, in this order, and announce it.
        kind: may stand between them and the call.
        closers: may follow a call, in this order.
        strips_newline: a line break at either end of a value is no part of it.
    """

    call: str
    name_end: str
    parameter: str
    key_ends: tuple[str, ...]
    value_end: str
    call_end: str
    openers: tuple[str, ...] = ()
    kind: str = ""
    closers: tuple[str, ...] = ()
    strips_newline: bool = False


@dataclass(frozen=True, slots=True)
class _Key:
    """Of an argument; `is_text` is what the mark says of its value, None = nothing."""

    name: str
    is_text: bool | None


class MarkedCallParser(ToolCallParser):
    """Parts of the parsers of such formats.

    A call is begun when its function, which must be a tool, has come. What breaks the call after that leaves its
    arguments open. A value whose end is missing ends where another parameter of the function begins, or the call ends.

    Attributes:
        form: the marks.
    """

    form: ClassVar[CallMarks]
    _open: ClassVar[Markers]
    _value_end: ClassVar[Markers]
    _following: ClassVar[tuple[str, ...]]
    _heads: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        form = cls.form
        cls._open = Markers(*form.openers, form.call)
        following = (*form.closers, *form.openers, form.call)
        cls._following = (*following, *(f"\n{mark}" for mark in following))
        heads = (form.parameter, form.call_end)
        cls._heads = (*heads, *(f"\n{mark}" for mark in heads))
        ends = (form.parameter, form.call_end, *([form.value_end] if form.strips_newline else []))
        cls._value_end = Markers(form.value_end, *(f"\n{end}" for end in ends), form.parameter, form.call_end)

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        while marker := (yield from reader.forward(out.content, self._open)):
            reader.keep(len(marker))
            is_call = yield from self._opened(marker)
            name = (yield from self._name()) if is_call else ""
            if not self.tools.allows(name):
                out.content(reader.kept())
                continue
            out.begin(name)
            is_whole = yield from self._parameters(name)
            rest = reader.kept()
            if not is_whole and out.buffers_tool_calls:
                out.fail(rest)
                continue
            out.end()
            if not is_whole:
                out.content(rest)
                continue
            for closer in self.form.closers:
                yield from reader.skip_spaces()
                yield from reader.skip(closer)

    def _opened(self, marker: str) -> Steps[bool]:
        """Read from an opener up to what begins the call; False when something else follows."""
        form, reader = self.form, self.reader
        while marker != form.call:
            yield from reader.skip_spaces()
            following = form.openers[form.openers.index(marker) + 1 :] if marker in form.openers else ()
            marker = yield from reader.skip(*following, *filter(None, (form.kind,)), form.call)
            if not marker:
                return False
        return True

    def _name(self) -> Steps[str]:
        """The function's name; "" when it is not ended."""
        name = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
        if self.form.name_end:
            is_ended = bool((yield from self.reader.skip(self.form.name_end)))
        else:
            mark = yield from self.reader.skip(*self._heads)
            self.reader.pos -= len(mark)
            is_ended = bool(mark)
        return name.strip().strip(QUOTES) if is_ended else ""

    def _key(self) -> Steps[tuple[_Key | None, str]]:
        """(a parameter's key, what was read); None for the key when it is not ended."""
        read = text = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
        for index, end in enumerate(self.form.key_ends):
            if index:
                read += yield from self.reader.run(SPACE_RUN, MAX_SPACES)
            found = yield from self.reader.skip(end)
            read += found
            if not found:
                return None, read
        kind = KIND.fullmatch(text.strip())
        name = (kind[1] if kind else text).strip().strip(QUOTES)
        return (_Key(name, kind[2] == "true" if kind else None) if name else None), read

    def _parameters(self, function: str) -> Steps[bool]:
        """Everything up to the end of the call; False when it is broken."""
        reader, out, form = self.reader, self.out, self.form
        seen: set[str] = set()
        found: _Key | str = ""  # what ended the value before
        out.arguments("{")
        while True:
            if not found:
                if not out.buffers_tool_calls:
                    reader.keep()
                yield from reader.skip_spaces()
                mark = yield from reader.skip(form.parameter, form.call_end)
                found = mark if mark != form.parameter else (yield from self._key())[0] or ""
            if found == form.call_end:
                out.arguments("}")
                return True
            if isinstance(found, str) or found.name in seen:
                return False
            out.arguments(f"{', ' if seen else ''}{encode(found.name)}: ")
            seen.add(found.name)
            if not out.buffers_tool_calls:
                reader.drop()
            ended = yield from self._value(function, found, seen)
            if ended is None:
                return False
            found = ended

    def _value(self, function: str, key: _Key, seen: Container[str]) -> Steps[_Key | str | None]:
        """Read a value; the next parameter's key or the call's end where that ended it, None at the answer's end."""
        out = self.out
        if self.form.strips_newline:
            yield from self.reader.skip("\n")
        types = self.tools.types_of(function, key.name)
        is_text = types is None or types == {"string"} or (key.is_text is True and "string" in types)
        if is_text and not (types is None and key.is_text is False):
            out.arguments('"')
            ended = yield from self._text(function, seen, lambda text: out.arguments(encode(text)[1:-1]))
            if ended is not None:
                out.arguments('"')
            return ended
        if key.is_text is False:
            types = (types or frozenset()) - {"string"}
        parts: list[str] = []
        ended = yield from self._text(function, seen, parts.append)
        text = "".join(parts)
        out.arguments(text if ended is None else json_of(text, types))
        return ended

    def _text(self, function: str, seen: Container[str], sink: Sink) -> Steps[_Key | str | None]:
        """Read a value's text into `sink`; returns as `_value`."""
        form, reader = self.form, self.reader
        while True:
            mark = yield from reader.forward(sink, self._value_end)
            if not mark:
                return None
            if mark.endswith(form.value_end):
                return ""
            if mark.endswith(form.parameter):
                key, read = yield from self._key()
                is_known = key is not None and self.tools.types_of(function, key.name) is not None
                if key is not None and is_known and key.name not in seen:
                    return key
            else:
                read = ""
                if (yield from self._is_after_call()):
                    return form.call_end
            sink(mark + read)

    def _is_after_call(self) -> Steps[bool]:
        """Whether what follows can follow a call: its closer, another call, the end of the answer."""
        mark = yield from self.reader.skip(*self._following)
        self.reader.pos -= len(mark)
        return bool(mark) or not (yield from self.reader.peek())

    @classmethod
    def parameter_marks(cls, middle: str = "", tail: str = "") -> ParameterMarks:
        """How a grammar writes an argument.

        Args:
            middle: what ends a quoted key; "" = what `key_ends` say.
            tail: what ends a value; "" = its mark and a line break.
        """
        form = cls.form
        line = "\n" if form.strips_newline else ""
        return ParameterMarks(
            head=form.parameter + ('"' if middle.startswith('"') else ""),
            middle=middle or "".join(form.key_ends) + line,
            tail=tail or f"{line}{form.value_end}\n",
            excludes=(form.value_end, form.parameter, form.call_end),
        )
