"""What a supervisor keeps of a request that has not ended, and whom it tells. Values and a protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import EngineDeadError, QuireError


class Listener(Protocol):
    """Callbacks of the supervisor."""

    def on_step(self, step: EngineCoreOutputs) -> None:
        """A step's outputs came."""

    def on_failed(self, handle: int, error: QuireError) -> None:
        """The core refused a request, or a request was given up."""

    def on_aborted(self, handle: int) -> None:
        """A request whose end was asked for was lost with its core before it ended."""

    def on_dead(self, error: EngineDeadError) -> None:
        """The engine is of no further use."""

    def restart(self, handle: int) -> list[int] | None:
        """A request is about to be sent again: the tokens it has put out; None when it was abandoned."""


@dataclass(slots=True)
class LiveRequest:
    """A request that was sent and has not ended.

    Attributes:
        num_deaths: cores in a row that died while it was with them and put out nothing.
        is_aborting: its end was asked for.
        is_sent: the core of now has it.
        was_lost: a core had it and died, and no other has it yet.
        weight_version: of the core that it was sent to last; None = it was not sent yet.
        deadline_s: until when it may wait without ever running, on the monotonic clock.
    """

    message: EngineCoreRequest
    num_deaths: int = 0
    is_aborting: bool = False
    is_sent: bool = False
    was_lost: bool = False
    weight_version: str | None = None
    deadline_s: float = math.inf
