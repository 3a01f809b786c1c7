"""Requests that belong together: what a feature that ties requests to each other may decide about them.

Called by the scheduler and by admission, through `RequestGroups`, which asks every kind in turn. A kind overrides the
methods it needs; forks of one prompt (`forks`) and beams of one search (`beam_groups`) are two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.core.engine_messages import FinishedRequest
from quire.core.request import Request
from quire.core.scheduler_output import NO_ROW_UPDATES, RowUpdates
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.update import Sampled
from quire.scheduler.waiting import Blocked


class Advanced(NamedTuple):
    """What became of samples that a group took for itself.

    Attributes:
        handles: [n] int64; requests that sampled.
        token_ids: [n] int32; what each is sent.
        finished: requests that ended with it.
    """

    handles: np.ndarray
    token_ids: np.ndarray
    finished: list[FinishedRequest]


class RequestGroup:
    """One kind of tie. Each method is asked about any request, whether or not it is of this kind.

    Attributes:
        reads_logprobs: decisions depend on log-probabilities, so a recording has to hold them.
    """

    @property
    def reads_logprobs(self) -> bool:
        """See above; by default False."""
        return False

    def on_arrive(self, request: Request) -> None:
        """A request was queued."""

    def on_place(self, request: Request) -> None:
        """A request got a row."""

    def on_stuck(self) -> None:
        """All that ran was held back, for want of room for the rest of its groups, and has been preempted."""

    def on_end(self, request: Request) -> None:
        """A request ends; it still has its row."""

    def with_siblings(self, handles: Iterable[int]) -> Iterable[int]:
        """`handles`, with those that end when these do."""
        return handles

    def has_started(self, request: Request) -> bool:
        """Whether a request is past its queue timeout: it, or one it depends on, has had a row."""
        return request.has_started

    def may_swap(self, request: Request) -> bool:
        """Whether the blocks of a request hold what they should once the last message has been executed."""
        return True

    # --- admission ---

    def check(self, request: Request, plan: StepPlan) -> Blocked | None:
        """Why a waiting request has to wait for others of its group; None = it has not."""
        return None

    def ignores_watermark(self, request: Request) -> bool:
        """Whether a request may take the last free blocks beside others."""
        return False

    def longer_prefix(self, request: Request, cached: CachedPrefix, plan: StepPlan) -> CachedPrefix:
        """`cached`, or more of the request's beginning that another one holds."""
        return cached

    def release_kept(self) -> bool:
        """Give up all blocks that are kept for requests that wait; False when there were none."""
        return False

    def pinned(self) -> list[CachedPrefix]:
        """What is kept for requests that wait."""
        return []

    # --- a step ---

    def mask_incomplete(self, rows: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
        """`num_wanted` ([num_rows] tokens, which may be written to), 0 for rows that sit out the step."""
        return num_wanted

    def held_back(self, rows: np.ndarray) -> np.ndarray:
        """[.] those of `rows` that sit out every step until more of their group run."""
        return rows[:0]

    def take_row_updates(self) -> RowUpdates:
        """What became of rows since the last message; given out once."""
        return NO_ROW_UPDATES

    def split_beams(self, sampled: Sampled) -> tuple[Sampled, Sampled | None]:
        """A step's samples without those that the group takes for itself, and these; None = it takes none."""
        return sampled, None

    def after_sample(self, split: Sampled) -> Advanced:
        """The samples that `split_beams` took, once the blocks that the step filled are published."""
        return Advanced(np.empty(0, np.int64), np.empty(0, np.int32), [])


class RequestGroups:
    """All kinds of groups, asked in order."""

    def __init__(self, *groups: RequestGroup) -> None:
        self._groups = groups

    @property
    def reads_logprobs(self) -> bool:
        """As `RequestGroup`, of any kind."""
        return any(group.reads_logprobs for group in self._groups)

    def on_arrive(self, request: Request) -> None:
        """As `RequestGroup`."""
        for group in self._groups:
            group.on_arrive(request)

    def on_place(self, request: Request) -> None:
        """As `RequestGroup`."""
        for group in self._groups:
            group.on_place(request)

    def on_stuck(self) -> None:
        """As `RequestGroup`."""
        for group in self._groups:
            group.on_stuck()

    def on_end(self, request: Request) -> None:
        """As `RequestGroup`."""
        for group in self._groups:
            group.on_end(request)

    def with_siblings(self, handles: Iterable[int]) -> Iterable[int]:
        """As `RequestGroup`, of all kinds."""
        for group in self._groups:
            handles = group.with_siblings(handles)
        return handles

    def has_started(self, request: Request) -> bool:
        """As `RequestGroup`, for any kind."""
        return any(group.has_started(request) for group in self._groups)

    def may_swap(self, request: Request) -> bool:
        """As `RequestGroup`, for every kind."""
        return all(group.may_swap(request) for group in self._groups)

    def check(self, request: Request, plan: StepPlan) -> Blocked | None:
        """The first refusal, if there is one."""
        for group in self._groups:
            blocked = group.check(request, plan)
            if blocked is not None:
                return blocked
        return None

    def ignores_watermark(self, request: Request) -> bool:
        """As `RequestGroup`, for any kind."""
        return any(group.ignores_watermark(request) for group in self._groups)

    def longer_prefix(self, request: Request, cached: CachedPrefix, plan: StepPlan) -> CachedPrefix:
        """The longest that any kind has."""
        for group in self._groups:
            cached = group.longer_prefix(request, cached, plan)
        return cached

    def release_kept(self) -> bool:
        """As `RequestGroup`, of all kinds."""
        return sum(group.release_kept() for group in self._groups) > 0

    def pinned(self) -> list[CachedPrefix]:
        """As `RequestGroup`, of all kinds."""
        return [prefix for group in self._groups for prefix in group.pinned()]

    def mask_incomplete(self, rows: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
        """As `RequestGroup`, of all kinds."""
        for group in self._groups:
            num_wanted = group.mask_incomplete(rows, num_wanted)
        return num_wanted

    def held_back(self, rows: np.ndarray) -> np.ndarray:
        """As `RequestGroup`, of the first kind that holds any back."""
        held = (group.held_back(rows) for group in self._groups)
        return next((some for some in held if len(some)), rows[:0])

    def take_row_updates(self) -> RowUpdates:
        """As `RequestGroup`, of all kinds."""
        taken = [updates for group in self._groups if (updates := group.take_row_updates()) is not NO_ROW_UPDATES]
        if not taken:
            return NO_ROW_UPDATES
        forks = tuple(fork for updates in taken for fork in updates.forks)
        return RowUpdates(forks, tuple(chosen for updates in taken for chosen in updates.chosen))

    def split_beams(self, sampled: Sampled) -> tuple[Sampled, list[tuple[RequestGroup, Sampled]]]:
        """A step's samples without those that groups take, and who takes which."""
        taken: list[tuple[RequestGroup, Sampled]] = []
        for group in self._groups:
            sampled, split = group.split_beams(sampled)
            if split is not None:
                taken.append((group, split))
        return sampled, taken
