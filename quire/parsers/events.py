"""What a parser finds in an answer, in order. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the function `name`; the `CallArguments` up to the next event of another kind are its arguments.

    Attributes:
        call_id: that the model has given it; "" = none.
    """

    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the JSON text of the last call's arguments."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments
