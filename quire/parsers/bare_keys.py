"""Objects whose keys are bare and whose texts stand between marks, as Gemma writes them, read into JSON as they come.

Used by its parser; no state beyond the value that is read.
"""

from __future__ import annotations

import re

from quire.parsers.json_text import MAX_DEPTH, MAX_NUMBER_CHARS, JsonText, short_string
from quire.parsers.reader import Markers, Reader, Sink, Steps
from quire.parsers.tools import encode, json_of

KEY_RUN = re.compile(r"[\w.$/-]*")
SCALAR_RUN = re.compile(r"[^,\]}<\n]*")
MAX_KEY_CHARS = 256
ANY_TYPE: frozenset[str] = frozenset()


class BareKeys:
    """Reads one object.

    Args:
        reader: behind its opening brace.
        sink: gets JSON text.
        quote: stands before and after a text.
    """

    def __init__(self, reader: Reader, sink: Sink, quote: str) -> None:
        self._reader = reader
        self._sink = sink
        self._quote = quote
        self._quotes = Markers(quote)

    def read(self) -> Steps[bool]:
        """Read up to the closing brace; False when the object is broken or cut."""
        reader, closers, is_first = self._reader, ["}"], True
        self._sink("{")
        while closers:
            yield from reader.skip_spaces()
            if (yield from reader.skip(closers[-1])):
                self._sink(closers.pop())
                is_first = False
                continue
            if not is_first:
                if not (yield from reader.skip(",")):
                    return False
                yield from reader.skip_spaces()
            key = (yield from self._key()) if closers[-1] == "}" else ""
            if key is None:
                return False
            self._sink(("" if is_first else ", ") + key)
            opened = yield from self._value()
            if opened is None or len(closers) == MAX_DEPTH:
                return False
            is_first = bool(opened)
            closers += opened
        return True

    def _key(self) -> Steps[str | None]:
        """JSON text of a key and its colon; None when there is none."""
        reader = self._reader
        if (yield from reader.skip(self._quote)):
            name: str | None = yield from reader.run(KEY_RUN, MAX_KEY_CHARS)
            if not (yield from reader.skip(self._quote)):
                return None
        elif (yield from reader.peek()) == '"':
            name = yield from short_string(reader, MAX_KEY_CHARS)
        else:
            name = yield from reader.run(KEY_RUN, MAX_KEY_CHARS)
        yield from reader.skip_spaces()
        if not name or not (yield from reader.skip(":")):
            return None
        return f"{encode(name)}: "

    def _value(self) -> Steps[str | None]:
        """Read a value, or the opening of a container, whose closer is returned; None when it is broken or cut."""
        reader, sink = self._reader, self._sink
        yield from reader.skip_spaces()
        mark = yield from reader.skip(self._quote, "{", "[")
        if mark == self._quote:
            sink('"')
            found = yield from reader.forward(lambda text: sink(encode(text)[1:-1]), self._quotes)
            if found:
                sink('"')
            return "" if found else None
        if mark:
            sink(mark)
            return "}" if mark == "{" else "]"
        if (yield from reader.peek()) == '"':
            return "" if (yield from JsonText(reader, sink).read()) else None
        text = (yield from reader.run(SCALAR_RUN, MAX_NUMBER_CHARS)).strip()
        is_cut = not (yield from reader.peek())
        if text:
            sink(text if is_cut else json_of(text, ANY_TYPE))
        return None if is_cut or not text else ""
