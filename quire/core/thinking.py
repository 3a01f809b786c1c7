"""ThinkingMarks: how an answer's thinking is told from what follows it, for the engine core.

Made by whoever knows the reasoning parser and the end of the prompt; read by `quire.structured_output.thinking`.
"""

from __future__ import annotations

import msgspec


class ThinkingMarks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Marks of the thinking in an answer's text.

    Attributes:
        starts: texts of which one, at the beginning of the answer, begins the thinking.
        ends: texts of which the first that comes ends it.
        is_open: the answer begins inside of the thinking.
        start_ids: token ids of those of `starts` that tokens can write alone; they are possible where a grammar waits.
        end_ids: token ids of one of `ends`, with which a budget ends the thinking.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool
    start_ids: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
