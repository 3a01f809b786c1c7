"""Requests with one prompt: it is computed for one of them, the others share its blocks.

Called by the scheduler and by admission. Owns who belongs together, and blocks kept for siblings that wait when the
request that computed them has left. What is kept is given up before anybody is preempted for want of blocks.
"""

from __future__ import annotations

from quire.core.request import Request
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request_group import RequestGroup
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.waiting import Blocked, WaitReason


class ForkGroups(RequestGroup):
    """Groups of unfinished requests by `EngineCoreRequest.fork_group`; costs nothing for requests without one."""

    def __init__(self, table: RequestTable, kv: KVCacheManager) -> None:
        self._table = table
        self._kv = kv
        self._members: dict[int, dict[int, Request]] = {}
        self._runners: dict[int, Request] = {}  # by group: a member that had a row when it was asked last
        self._kept: dict[int, CachedPrefix] = {}

    def on_arrive(self, request: Request) -> None:
        """It joins its group."""
        group = request.message.fork_group
        if group is not None:
            self._members.setdefault(group, {})[request.handle] = request

    def on_end(self, request: Request) -> None:
        """It leaves its group. Its prompt's blocks are kept if no other request holds them for a sibling."""
        group = request.message.fork_group
        if group is None:
            return
        members = self._members[group]
        del members[request.handle]
        if self._runners.get(group) is request:
            del self._runners[group]
        if not members:
            del self._members[group]
        if not self._has_waiting(group):
            self._let_go(group)
            return
        num_tokens, runner = request.num_prompt_tokens - 1, self._runner(group)
        is_last_with_prompt = self._has_computed(request, num_tokens) and not (
            runner is not None and self._has_computed(runner, num_tokens)
        )
        if is_last_with_prompt and num_tokens and group not in self._kept:
            prefix = self._kv.shared_prefix(request.row, num_tokens)
            if prefix is not None:
                self._kept[group] = prefix
                self._kv.pin(prefix)

    def on_place(self, request: Request) -> None:
        """What was kept goes when no sibling waits for it any longer."""
        group = request.message.fork_group
        if group is None:
            return
        self._runners.setdefault(group, request)
        if group in self._kept and not self._has_waiting(group):
            self._let_go(group)

    def check(self, request: Request, plan: StepPlan) -> Blocked | None:
        """It waits while a sibling that runs is computing the prompt."""
        group, num_tokens = request.message.fork_group, _num_shareable(request)
        if group is None or group in self._kept or not num_tokens:
            return None
        runner = self._runner(group)
        if runner is None or self._is_source(runner, num_tokens, plan):
            return None
        return Blocked(request.handle, WaitReason.SIBLING, is_passed_over=True)

    def longer_prefix(self, request: Request, cached: CachedPrefix, plan: StepPlan) -> CachedPrefix:
        """`cached`, or the prompt's blocks of a sibling when they hold more."""
        group, num_tokens = request.message.fork_group, _num_shareable(request)
        if group is None or num_tokens <= cached.num_tokens:
            return cached
        pinned = self._kept.get(group)
        if pinned is not None:
            return pinned if pinned.num_tokens > cached.num_tokens else cached
        runner = self._runner(group)
        if runner is None or not self._is_source(runner, num_tokens, plan):
            return cached
        return self._kv.shared_prefix(runner.row, num_tokens) or cached

    def release_kept(self) -> bool:
        """Give up all blocks that are kept for requests that wait; False when there were none."""
        groups = list(self._kept)
        for group in groups:
            self._let_go(group)
        return bool(groups)

    def pinned(self) -> list[CachedPrefix]:
        """What is kept for requests that wait."""
        return list(self._kept.values())

    def _let_go(self, group: int) -> None:
        prefix = self._kept.pop(group, None)
        if prefix is not None:
            self._kv.unpin(prefix)

    def _has_waiting(self, group: int) -> bool:
        return any(member.row < 0 for member in reversed(self._members.get(group, {}).values()))

    def _runner(self, group: int) -> Request | None:
        """A member that has a row, the same one for as long as it has it."""
        runner = self._runners.get(group)
        if runner is None or runner.row < 0:
            runner = next((member for member in self._members[group].values() if member.row >= 0), None)
            if runner is None:
                self._runners.pop(group, None)
            else:
                self._runners[group] = runner
        return runner

    def _is_source(self, runner: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Whether the worker holds the first tokens of a request with a row; what this step writes is not there yet."""
        return not plan.is_new(runner.row) and self._has_computed(runner, num_tokens)

    def _has_computed(self, request: Request, num_tokens: int) -> bool:
        return request.row >= 0 and int(self._table.num_computed_tokens[request.row]) >= num_tokens


def _num_shareable(request: Request) -> int:
    """How many first tokens a request may take from a sibling: the prompt's, but one is left to compute.

    None when log-probabilities of its prompt are asked for: these come of computing it.
    """
    if request.message.sampling_params.prompt_logprobs is not None:
        return 0
    return min(request.num_prompt_tokens, len(request.token_ids) - 1)
