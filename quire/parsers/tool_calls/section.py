"""Calls between the marks of one section, each between marks of its own. Formats derive from `SectionParser`."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from quire.parsers.call_object import Found, JsonCallParser
from quire.parsers.reader import Markers, Steps


class SectionParser(JsonCallParser):
    """Reads sections, and calls without one; what a call looks like is the format's.

    Attributes:
        section: what begins and ends a section.
        call: what begins and ends a call.
    """

    needs_special_tokens = True
    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, (section_begin, section_end), (call_begin, call_end) = self.reader, self.section, self.call
        opening, closing = Markers(section_begin, call_begin), Markers(call_end)
        while marker := (yield from reader.forward(self.out.content, opening)):
            reader.keep(len(marker))
            if marker == section_begin:
                yield from reader.skip_spaces()
                if not (yield from reader.skip(call_begin)):
                    self.out.content(reader.kept())
                    continue
            found = yield from self.parse_call()
            yield from self.settle(found, closing)
            if found is not Found.NO_CALL:
                yield from reader.skip_spaces()
                yield from reader.skip(section_end)

    @abstractmethod
    def parse_call(self) -> Steps[Found]:
        """A call, whose begin was read, up to its end."""
