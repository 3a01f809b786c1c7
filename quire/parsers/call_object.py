"""Calls written as JSON objects {"name": ..., "arguments": {...}}, which most formats have. No state of its own."""

from __future__ import annotations

from enum import Enum

from quire.parsers.base import ToolCallParser
from quire.parsers.json_text import MAX_KEPT_CHARS, JsonText, short_string
from quire.parsers.reader import MAX_SPACES, SPACE_RUN, Markers, Steps

MAX_NAME_CHARS = 256
MAX_OTHER_CHARS = 1024  # of values that are no part of the call
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


class Found(Enum):
    """What stood where a call was expected."""

    NO_CALL = "no call"
    CALL = "call"
    BROKEN = "broken arguments"


class JsonCallParser(ToolCallParser):
    """Parts of the parsers of such formats.

    A call is begun when its name, which must be that of a tool, and the opening of its arguments have come: a brace and
    what may follow it, a quote or the other brace. Before that it is content if it breaks. After that its arguments are
    emitted as they are written, broken or not.
    """

    def call_object(self, *, needs_arguments: bool = False) -> Steps[Found]:
        """Read an object.

        Args:
            needs_arguments: an object with a name alone is no call.
        """
        reader = self.reader
        if not (yield from reader.skip("{")):
            return Found.NO_CALL
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        is_begun = False
        left = MAX_OTHER_CHARS
        while True:
            yield from reader.skip_spaces()
            key = yield from short_string(reader, MAX_NAME_CHARS)
            yield from reader.skip_spaces()
            if key is None or not (yield from reader.skip(":")):
                break
            yield from reader.skip_spaces()
            if key in NAME_KEYS and name is None:
                name = yield from short_string(reader, MAX_NAME_CHARS)
                if name is None or not self.tools.allows(name):
                    break
                if early is not None:
                    is_begun = self._begin(name, "".join(early))
            elif key in ARGUMENT_KEYS and not is_begun and early is None:
                if name is not None:
                    found = yield from self.call_arguments(name)
                    if found is not Found.CALL:
                        return found
                    is_begun = True
                elif (yield from reader.peek()) == "{":
                    early = []
                    if not (yield from JsonText(reader, early.append, MAX_KEPT_CHARS).read()):
                        break
                else:
                    break
            else:
                skipped: list[str] = []
                if not (yield from JsonText(reader, skipped.append, left).read()):
                    break
                left -= sum(map(len, skipped))
            yield from reader.skip_spaces()
            if not (yield from reader.skip(",")):
                is_closed = yield from reader.skip("}")
                if is_closed and name is not None and not is_begun and not needs_arguments:
                    is_begun = self._begin(name, "{}")
                break
        return Found.CALL if is_begun else Found.NO_CALL

    def call_arguments(self, name: str, call_id: str = "") -> Steps[Found]:
        """Read the arguments of `name`, an object; they are emitted once its opening has come.

        Args:
            call_id: as in `Output.begin`.
        """
        reader = self.reader
        if not (yield from reader.skip("{")):
            return Found.NO_CALL
        spaces = yield from reader.run(SPACE_RUN, MAX_SPACES)
        if (yield from reader.peek()) not in ('"', "}", ""):
            return Found.NO_CALL
        self.out.begin(name, call_id)
        is_whole = yield from JsonText(reader, self.out.arguments).read("{" + spaces)
        return Found.CALL if is_whole else Found.BROKEN

    def call_list(self) -> Steps[Found]:
        """Read a list of objects. Each is ended as it is complete; the outcome is the last one's."""
        reader = self.reader
        if not (yield from reader.skip("[")):
            return Found.NO_CALL
        while True:
            yield from reader.skip_spaces()
            found = yield from self.call_object()
            if found is not Found.CALL:
                return found
            self.out.end()
            reader.keep()
            yield from reader.skip_spaces()
            if not (yield from reader.skip(",")):
                yield from reader.skip("]")
                return Found.CALL

    def settle(self, found: Found, closers: Markers | None = None, openers: Markers | None = None) -> Steps[None]:
        """End what began where the reader's `keep` is.

        Args:
            closers: what follows a call; None = nothing.
            openers: what begins the next one, where nothing follows; with neither, broken arguments go on to the end.
        """
        if found is Found.BROKEN and not self.out.buffers_tool_calls:
            self.reader.drop()
            if closers is not None:
                yield from self.reader.forward(self.out.arguments, closers)
            elif openers is not None:
                marker = yield from self.reader.forward(self.out.arguments, openers)
                self.reader.pos -= len(marker)
            else:
                yield from self.reader.forward_rest(self.out.arguments)
            self.out.end()
        elif found is Found.CALL:
            self.reader.drop()
            self.out.end()
            if closers is not None:
                yield from self.reader.skip_spaces()
                yield from self.reader.skip(*closers.texts)
        else:
            self.out.fail(self.reader.kept())

    def _begin(self, name: str, arguments: str) -> bool:
        self.out.begin(name)
        self.out.arguments(arguments)
        return True
