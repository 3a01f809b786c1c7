"""What crosses between an engine core and a process that follows one grammar: length-prefixed msgpack. Values only."""

from __future__ import annotations

import msgspec

from quire.core.reasoning import ReasoningDelimiters
from quire.structured_output.interface import GrammarSpec


class FollowStart(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar to be followed, and how far the answer is. Answered by a `FollowReply`.

    Attributes:
        spec: None = any text, which no process follows.
        reasoning: what delimits the answer's reasoning; None = the grammar begins with the answer.
        shows_special: control tokens are part of the text.
        budget: tokens of reasoning; None = any number.
        end_ids: ids that end the answer besides the primary one.
        token_ids: of the answer so far.
    """

    spec: GrammarSpec | None
    reasoning: ReasoningDelimiters | None = None
    shows_special: bool = False
    budget: int | None = None
    end_ids: tuple[int, ...] = ()
    token_ids: list[int] = []


class FollowStep(msgspec.Struct, frozen=True):
    """The answer's next token. Answered by a `FollowReply`."""

    token_id: int


class FollowReply(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answer stands.

    Attributes:
        line: [bitmask_size] int32, the tokens that may come next.
        is_terminated: the end of the answer was accepted.
        refused_id: the token that the grammar does not allow; None = all were accepted.
        error: why the grammar is followed no further; None = it is.
    """

    line: bytes = b""
    is_terminated: bool = False
    refused_id: int | None = None
    error: str | None = None
