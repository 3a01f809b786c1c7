"""Beams in the batch: each is a request on a row of its own, and those of one search advance together.

Called by the scheduler. Owns the searches. A step in which only some beams of a search sampled does not count for it:
they compute their last token again, with the same bits, when all are there. So a beam may be preempted or held back
like any request, and nothing else needs to know of beams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import BeamAnswer, FinishedRequest, FinishReason
from quire.core.request import Request
from quire.core.scheduler_output import NO_ROW_UPDATES, ForcedTokens, RowFork, RowUpdates
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.beam_search import BeamSearch, Continuation
from quire.scheduler.request_group import Advanced, RequestGroup
from quire.scheduler.request_table import RequestTable, RowFlag, max_total_tokens
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.update import Sampled, select_sampled
from quire.scheduler.waiting import Blocked, WaitReason

_IS_BEAM = int(RowFlag.BEAM)


@dataclass(slots=True)
class _Group:
    """One search; its beams are its members in the order of their handles."""

    search: BeamSearch
    num_beams: int
    members: dict[int, Request] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.num_beams

    def rows(self) -> list[int]:
        return [member.row for _, member in sorted(self.members.items())]


class BeamGroups(RequestGroup):
    """All searches; empty, and free of cost, while there are none.

    A search advances when all of its beams have rows, so two that each hold some of the rows would wait for each other
    for ever. Searches enter one after another, then: from the first beam that gets a row until the search has advanced,
    beams of others wait. When all that runs waits for beams without room, it is preempted, and the next search enters
    alone: whatever else waits is passed over, and in an empty cache there is room for a search.
    """

    def __init__(self, table: RequestTable, kv: KVCacheManager) -> None:
        self._table = table
        self._kv = kv
        self._groups: dict[int, _Group] = {}
        self._key_of: dict[int, int] = {}
        self._entering: int | None = None  # key of the search that enters, while a beam of it has a row
        self._enters_alone = False
        self._forks: list[RowFork] = []
        self._chosen: list[ForcedTokens] = []

    @property
    def reads_logprobs(self) -> bool:
        """While there are searches."""
        return bool(self._key_of)

    def on_arrive(self, request: Request) -> None:
        """The first beam of a search begins it."""
        message, spec = request.message, request.message.sampling_params.beam_search
        if spec is None:
            return
        key = request.handle if message.fork_group is None else message.fork_group
        if key not in self._groups:
            ends = set(request.stop_token_ids)
            if not message.sampling_params.ignore_eos and message.eos_token_id >= 0:
                ends.add(message.eos_token_id)
            num_prompt, max_model_len = request.num_prompt_tokens, self._table.max_model_len
            num_total = max_total_tokens(num_prompt, message.sampling_params.max_tokens, max_model_len)
            search = BeamSearch(spec, num_total - num_prompt, frozenset(ends))
            self._groups[key] = _Group(search, spec.num_beams)
        self._groups[key].members[request.handle] = request
        self._key_of[request.handle] = key

    def on_place(self, request: Request) -> None:
        """The first beam that gets a row has its search enter."""
        key = self._key_of.get(request.handle)
        if key is not None and not self._is_entering(besides=request):
            self._entering = key

    def on_stuck(self) -> None:
        """The next search enters alone."""
        self._enters_alone = True

    def on_end(self, request: Request) -> None:
        """The last beam of a search ends it."""
        key = self._key_of.pop(request.handle, None)
        if key is not None:
            del self._groups[key].members[request.handle]
            if not self._groups[key].members:
                del self._groups[key]

    def may_swap(self, request: Request) -> bool:
        """No beam: its newest block may still wait for its copy."""
        return request.handle not in self._key_of

    def check(self, request: Request, plan: StepPlan) -> Blocked | None:
        """A request waits while another search enters: any beam, and whatever else there is when that enters alone."""
        key = self._key_of.get(request.handle)
        may_wait = self._enters_alone or key is not None
        if not may_wait or key == self._entering or not self._is_entering():
            return None
        return Blocked(request.handle, WaitReason.SIBLING, is_passed_over=True)

    def _is_entering(self, besides: Request | None = None) -> bool:
        group = None if self._entering is None else self._groups.get(self._entering)
        return group is not None and any(one.row >= 0 and one is not besides for one in group.members.values())

    def ignores_watermark(self, request: Request) -> bool:
        """A beam does: the search that has begun cannot go on without it."""
        return request.handle in self._key_of

    def has_started(self, request: Request) -> bool:
        """Whether a request, or a beam of its search, has had a row."""
        key = self._key_of.get(request.handle)
        members = [request] if key is None else self._groups[key].members.values()
        return any(member.has_started for member in members)

    def with_siblings(self, handles: Iterable[int]) -> Iterable[int]:
        """`handles`, each followed by the other beams of its search: no beam ends alone."""
        if not self._key_of:
            return handles
        found: dict[int, None] = {}
        for handle in handles:
            found[handle] = None
            if handle in self._key_of:
                found.update(dict.fromkeys(sorted(self._groups[self._key_of[handle]].members)))
        return list(found)

    def mask_incomplete(self, rows: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
        """`num_wanted` ([num_rows] tokens), 0 for rows that have nothing to compute before all of their search run."""
        if self._key_of:
            num_wanted[self._is_held(rows)] = 0
        return num_wanted

    def held_back(self, rows: np.ndarray) -> np.ndarray:
        """[.] those of `rows` that have nothing to compute before all of their search run."""
        return rows[self._is_held(rows)] if self._key_of else rows[:0]

    def _is_held(self, rows: np.ndarray) -> np.ndarray:
        is_held: np.ndarray = (self._table.flags[rows] & _IS_BEAM) != 0
        is_held &= ~self._table.is_prefill(rows)
        for i in np.flatnonzero(is_held).tolist():
            is_held[i] = min(self._group_on(int(rows[i])).rows()) < 0
        return is_held

    def split_beams(self, sampled: Sampled) -> tuple[Sampled, Sampled | None]:
        """The step's samples without those of beams, and those of beams; None while there are no searches.

        Beams whose siblings did not sample are taken back to before their last token.
        """
        if not self._groups:
            return sampled, None
        is_beam = (self._table.flags[sampled.rows] & _IS_BEAM) != 0
        beams = select_sampled(sampled, is_beam)
        present = set(beams.rows.tolist())
        for row in beams.rows.tolist():
            group = self._group_on(row)
            if not (group.is_complete and present.issuperset(group.rows())):
                self._table.num_computed_tokens[row] -= 1
        return select_sampled(sampled, ~is_beam), beams

    def after_sample(self, split: Sampled) -> Advanced:
        """Move on every search whose beams all sampled."""
        handles = self._table.handle[split.rows]
        present = {row: entry for entry, row in enumerate(split.rows.tolist())}
        groups = {id(group): group for group in map(self._group_on, present)}
        finished: list[FinishedRequest] = []
        for group in groups.values():
            rows = group.rows()
            if group.is_complete and present.keys() >= set(rows):
                finished += self._advance_one(group, rows, split, [present[row] for row in rows])
        return Advanced(handles, split.token_ids, finished)

    def take_row_updates(self) -> RowUpdates:
        """Rows that took over others."""
        if not self._chosen:
            return NO_ROW_UPDATES
        updates = RowUpdates(tuple(self._forks), tuple(self._chosen))
        self._forks, self._chosen = [], []
        return updates

    def _group_on(self, row: int) -> _Group:
        return self._groups[self._key_of[int(self._table.handle[row])]]

    def _advance_one(self, group: _Group, rows: list[int], beams: Sampled, entries: list[int]) -> list[FinishedRequest]:
        if self._entering is not None and self._groups.get(self._entering) is group:
            self._entering, self._enters_alone = None, False
        table, lines = self._table, beams.logprobs
        assert lines is not None, "beams ask for log-probabilities"
        num_top = table.request_on(rows[0]).message.sampling_params.logprobs or 0
        places = np.searchsorted(lines.index, np.array(entries))
        start, end = int(table.num_prompt_tokens[rows[0]]), int(table.num_tokens[rows[0]])
        continuation = group.search.advance(
            lines.token_ids[places, 1 : 1 + num_top],
            lines.logprobs[places, 1 : 1 + num_top],
            lambda beam: np.array(table.token_ids[rows[beam], start:end]),
        )
        if continuation is None:
            return _answers(group)
        self._continue(group, rows, continuation, end)
        return []

    def _continue(self, group: _Group, rows: list[int], continuation: Continuation, num_tokens: int) -> None:
        """Each beam lives on in its own row if it can; the others take over rows of beams that ended."""
        parents = continuation.parents.tolist()
        heirs: list[int] = [-1] * len(rows)  # by row: which continuation is written on it
        spare = [beam for beam in range(len(rows)) if beam not in set(parents)]
        for i, parent in enumerate(parents):
            heirs[parent if heirs[parent] < 0 else spare.pop(0)] = i
        forks = [
            self._fork(rows[parents[i]], rows[beam], num_tokens) for beam, i in enumerate(heirs) if parents[i] != beam
        ]
        row_array, token_ids = np.array(rows, dtype=np.intp), continuation.token_ids[heirs]
        group.search.reorder(heirs)
        self._table.append_tokens(row_array, token_ids)
        self._forks += forks
        self._chosen.append(ForcedTokens(row_array, np.full(len(rows), num_tokens), token_ids))

    def _fork(self, source: int, row: int, num_tokens: int) -> RowFork:
        """Make `row` what `source` is; its own blocks are enough for what it does not share."""
        table, request = self._table, self._table.request_on(row)
        table.token_ids[row, :num_tokens] = table.token_ids[source, :num_tokens]
        request.block_tokens, request.block_hashes = [], []  # of the tokens that it had
        prefix = self._kv.shared_prefix(source, num_tokens)
        assert prefix is not None, "a row holds what its next token sees"
        self._kv.free(row)
        block_ids = self._kv.place(row, request, prefix, num_tokens)
        return RowFork(row, source, num_tokens, block_ids)


def _answers(group: _Group) -> list[FinishedRequest]:
    """The i-th best sequence for the i-th member."""
    answers = []
    for (handle, member), found in zip(sorted(group.members.items()), group.search.finished, strict=True):
        last = int(found.token_ids[-1])
        is_stop_id = found.is_stopped and last != member.message.eos_token_id
        answers.append(
            FinishedRequest(
                handle,
                FinishReason.STOP if found.is_stopped else FinishReason.LENGTH,
                last if is_stop_id else None,
                beam=BeamAnswer(found.token_ids, found.cum_logprob, found.score),
            )
        )
    return answers
