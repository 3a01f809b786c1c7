"""What is found in an answer, in order, for the writers of every API. Values, and the reader of plain answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.parsers.events import Content, Reasoning


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The answer's call number `index` begins; the `ToolCallDelta`s of the same index are its arguments."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A further part of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerEvent = Content | Reasoning | ToolCallStart | ToolCallDelta


class AnswerReader(Protocol):
    """Reads one answer as its text comes; the events of any split of it come to the same."""

    @property
    def num_reasoning(self) -> int:
        """Tokens of thinking so far."""

    def push(self, text: str, token_ids: Sequence[int], *, is_end: bool) -> list[AnswerEvent]:
        """The next part of the answer; the events that are decided by now."""

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason, given the engine's: an answer that ended by itself and has calls ended for them."""


class PlainAnswer:
    """An answer that is text and nothing else."""

    num_reasoning = 0

    def push(self, text: str, token_ids: Sequence[int], *, is_end: bool) -> list[AnswerEvent]:
        """As `AnswerReader.push`."""
        return [Content(text)] if text else []

    def finish_reason(self, reason: str | None) -> str | None:
        """As `AnswerReader.finish_reason`."""
        return reason
