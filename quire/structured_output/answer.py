"""Answer: one structured request on its way through its grammar. Owned by the grammar manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import EngineCoreRequest
from quire.structured_output.answer_steps import Trial
from quire.structured_output.compile.pool import CompileOutcome
from quire.structured_output.followers import Follower
from quire.structured_output.interface import Matcher
from quire.structured_output.restrictions import Restrictions

ONCE_S, MEAN_S = 0.05, 0.005
"""CPU time of a token, its mask included: beyond this once, or on average, a grammar is expensive."""
NUM_AVERAGED = 8


@dataclass(slots=True, eq=False)
class Answer:
    """One structured request.

    Attributes:
        compiled: its grammar, made or in the making.
        grammar: where the answer stands; None until the grammar is made, and where it is followed by a process.
        follower: follows the grammar, when that is expensive.
        end_ids: ids that end the answer besides the primary one.
        restrictions: what else the request forbids; None = nothing.
        output: the tokens so far.
        mask_s: CPU time of the newest mask.
        mean_s: CPU time of a token, averaged over the newest.
    """

    message: EngineCoreRequest
    compiled: Future[CompileOutcome]
    grammar: Matcher | None = None
    follower: Follower | None = None
    end_ids: tuple[int, ...] = ()
    restrictions: Restrictions | None = None
    output: list[int] = field(default_factory=list)
    mask_s: float = 0.0
    mean_s: float = 0.0

    @property
    def is_free(self) -> bool:
        """Any token may come next."""
        return self.grammar is not None and self.grammar.is_free

    @property
    def is_terminated(self) -> bool:
        """The end of the answer was accepted."""
        if self.follower is not None:
            return self.follower.is_terminated
        return self.grammar is not None and self.grammar.is_terminated()

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        """As `Matcher.fill_bitmask`."""
        if self.follower is not None:
            bitmask[row] = self.follower.line
            return
        assert self.grammar is not None, "only requests whose grammar is made run"
        self.grammar.fill_bitmask(bitmask, row)

    @contextmanager
    def trying(self) -> Iterator[Callable[[int], bool]]:
        """What takes the grammar through a draft, False where that is not possible; behind this it is where it was.

        One that a process follows is not taken through any.
        """
        if self.grammar is None:
            yield lambda token_id: False
            return
        trial = Trial(self.grammar, self.message.eos_token_id, self.end_ids)
        try:
            yield trial.advance
        finally:
            trial.take_back()

    def is_expensive(self, advance_s: float) -> bool:
        """Whether tokens take too long for a step, the newest one `advance_s` and its mask."""
        spent = advance_s + self.mask_s
        self.mean_s += (spent - self.mean_s) / NUM_AVERAGED
        return spent > ONCE_S or self.mean_s > MEAN_S
