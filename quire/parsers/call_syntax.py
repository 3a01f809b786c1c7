"""CallSyntax: how a format writes calls, from which grammars are made. Values only; given by the parsers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarks:
    """How arguments are written that are marked one by one: `head`, the key, `middle`, the value, `tail`.

    Attributes:
        json_middle: stands in the place of `middle` before a value that is no text; None = the same.
        excludes: what a value must not hold, as the parser would take it for its end.
    """

    head: str
    middle: str
    tail: str
    json_middle: str | None = None
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The parts of an answer that is calls and nothing else, as the format's parser reads it.

    An answer is `begin`, calls with `separator` between them, `end`. A call is `head`, the name, `middle`, the
    arguments, `tail`. A part that names a control token of the vocabulary is written with that token.

    Attributes:
        openers: texts with which a call begins, wherever they stand; without them calls among text have no grammar.
        has_several: more than one call can be written.
        starts_answer: a call stands at the beginning of an answer, too, without any of them.
        excludes: what texts in the arguments must not hold, as the parser would take it for the end of the call.
        reasoning: what begins and what ends a stretch of free text that may stand before all else; None = nothing may.
        parameters: how arguments are marked one by one (`xml_arguments`); None = they are a JSON object.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    openers: tuple[str, ...] = ()
    has_several: bool = True
    starts_answer: bool = False
    excludes: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    parameters: ParameterMarks | None = None


def json_call(arguments: str = "arguments") -> tuple[str, str, str]:
    """(head, middle, tail) of a call that is a JSON object."""
    return '{"name": "', f'", "{arguments}": ', "}"
