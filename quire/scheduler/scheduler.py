"""Scheduler: which requests run in each step, in which KV-cache blocks, and when a request ends.

Called by EngineCore: `schedule`, then `update_from_output` with what the step sampled. Owns the request table,
the waiting queue and the KV cache manager. What passes between a step's two halves is the `Step`, which the caller has.

Two requests, max_num_batched_tokens=8, blocks of 4 tokens: A has a prompt of 6 tokens, B of 10:

    add_request(A), add_request(B)                      # both wait
    schedule(): A computes 6 tokens, B its first 2      # A: row 0, blocks 1 2; B: row 1, block 3; 8 tokens in all
    update_from_output: A samples a token               # A: 7 tokens; B has 8 of its prompt left and samples nothing
    schedule(): A decodes 1 token, B computes 7         # rows that run come first, then what is left of the budget
    update_from_output: A stops                         # A's full block stays in the prefix cache, its row is free
    schedule(): B computes 1 token, the last of its prompt
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.drafts import DraftController, DraftProposer
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.kv_spec import KVCacheConfig
from quire.core.request import STATUS_AT_END, Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.stats import EventKind, SchedulerStats
from quire.kv_cache.block_hash import BLOCK_HASHES
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.admission import Admission, AdmissionGate, AdmissionRules
from quire.scheduler.beam_groups import BeamGroups
from quire.scheduler.budget import StepBudget, cap_at_checkpoints, share_prompt_tokens
from quire.scheduler.drafts import Drafts
from quire.scheduler.forks import ForkGroups
from quire.scheduler.in_flight import StepsInFlight
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.kv_tiers import KVTiers
from quire.scheduler.limits import make_limits, watermark_counts
from quire.scheduler.outbox import Outbox
from quire.scheduler.preemption import choose_victim, suspend, would_lose_progress
from quire.scheduler.request_group import Advanced, RequestGroup, RequestGroups
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows, num_missing_blocks, num_wanted_tokens
from quire.scheduler.scheduling_policy import make_scheduling_policy
from quire.scheduler.step import Step
from quire.scheduler.step_costs import make_step_costs
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.stop import Stop
from quire.scheduler.swapping import Swapping
from quire.scheduler.unfinished import UnfinishedRequests
from quire.scheduler.update import Sampled, keep_alive, num_kept_tokens, take_in_turns, take_prompt_logprobs
from quire.scheduler.validation import check_can_run
from quire.scheduler.waiting import Blocked

_COMPLETE = frozenset((FinishReason.STOP, FinishReason.LENGTH))


class Scheduler:
    """Serves requests in the order of a policy: chunked prefill, prefix caching, preemption by recompute or swap.

    Args:
        scheduler_config: resolved: its limits are numbers.
        cache_config: prefix caching and watermark.
        kv_cache_config: number and size of blocks.
        max_model_len: most tokens of a request, prompt and output.
        clock: seconds, for events.
        gates: further reasons for which a waiting request must wait.
        proposer, controller: of drafts, and of how many are verified; None = there are none, all that find room.
        tier: where keys and values are kept beside the cache and the swap space; None = nowhere.
        max_steps_in_flight, waits_for_tokens, max_step_drafts: as in `SchedulerSetup`.

    Raises:
        ConfigError: a limit is missing, or the limits contradict each other.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        gates: Sequence[AdmissionGate] = (),
        proposer: DraftProposer | None = None,
        controller: DraftController | None = None,
        tier: KVTier | None = None,
        max_steps_in_flight: int = 1,
        waits_for_tokens: bool = False,
        max_step_drafts: int | None = None,
    ) -> None:
        self._limits = make_limits(scheduler_config, max_model_len)
        self._costs = make_step_costs(self._limits.max_decode_slowdown, self._limits.max_step_s)
        self._kv = KVCacheManager(
            kv_cache_config,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=max_model_len,
            hash_fn=BLOCK_HASHES[cache_config.prefix_caching_hash_algo],
            max_chunk_tokens=self._limits.max_num_batched_tokens * max_steps_in_flight,  # passed blocks go late
            checkpoint_interval=cache_config.prefix_cache_retention_interval,
        )
        if not self._kv.can_take_back and scheduler_config.enable_chunked_prefill:
            self._limits = dataclasses.replace(self._limits, caps=(cap_at_checkpoints(self._kv), *self._limits.caps))
        self._table = RequestTable(self._limits.max_num_seqs, max_model_len)
        self._running = RunningRows(self._table)
        self._drafts = Drafts(proposer, controller, self._table, self._kv, max_step_drafts)
        self._order = make_scheduling_policy(scheduler_config.scheduling_policy, self._table, self._kv)
        self.service = self._order.service  # what tenants were served; None = the policy shares nothing among them
        self._requests = UnfinishedRequests(clock)
        self._outbox = Outbox(clock)
        watermark, *more_watermarks = watermark_counts(cache_config, kv_cache_config)
        rules = AdmissionRules(
            enable_chunked_prefill=scheduler_config.enable_chunked_prefill,
            reserve_full_prompt=scheduler_config.reserve_full_prompt,
            watermark_blocks=watermark, more_watermark_blocks=tuple(more_watermarks),
            caps=self._limits.caps, gates=gates,
        )  # fmt: skip
        mode, waiting = scheduler_config.preemption_mode, self._order.queue
        swapping = Swapping(mode, kv_cache_config, self._kv, self._table, self._running, waiting)
        self._tiers = KVTiers(self._kv, self._table, swapping, tier)
        groups = (ForkGroups(self._table, self._kv), BeamGroups(self._table, self._kv))
        self._groups = RequestGroups(*groups, *([] if tier is None else [self._tiers]))
        self._admission = Admission(
            rules, self._order, self._table, self._running, self._kv, self._outbox, self._groups, self._tiers
        )
        self._held: frozenset[int] = frozenset()
        self._in_flight = StepsInFlight(self._table, max_steps_in_flight, waits_for_tokens=waits_for_tokens)

    # --- requests come and go ---

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            ValidationError: it can never run (longer than max_model_len, or than the whole cache).
        """
        assert request.handle not in self._requests, "a handle names one request"
        check_can_run(request, self._limits, self._kv)
        queued = Request.from_message(request)
        self._kv.note_arrival(queued)
        self._order.enter(queued, self._requests.num_arrived)
        self._requests.add(queued)
        self._order.queue.add(queued)
        self._groups.on_arrive(queued)
        self._drafts.begin(request)
        self._outbox.note_event(request.handle, EventKind.QUEUED)

    def finish_requests(
        self, handles: Iterable[int], reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> None:
        """End requests from outside, in any state; unknown and finished handles are ignored."""
        for handle in self._groups.with_siblings(handles):
            request = self._requests.get(handle)
            if request is None:
                continue
            self._end(request, FinishedRequest(handle, reason, error=error, error_field=error_field))
            if request.row >= 0:
                self._release_rows([request.row])
            else:
                self._admission.remove(handle)

    def hold(self, handles: Collection[int]) -> None:
        """From now on these requests sit out the steps, and no others; they keep their rows and blocks."""
        self._held = frozenset(handles)

    def _end(self, request: Request, finished: FinishedRequest) -> None:
        """Answer a request; its row, if it has one, is its own until `_release_rows`."""
        request.status = STATUS_AT_END[finished.finish_reason]
        num_tokens = len(request.token_ids) if request.row < 0 else int(self._table.num_tokens[request.row])
        token_ids = request.token_ids if request.row < 0 else self._table.token_ids[request.row, :num_tokens]
        self._drafts.end(request.handle, token_ids, request.num_prompt_tokens)
        is_complete = finished.finish_reason in _COMPLETE
        self._order.note_ended(request, num_tokens - request.num_prompt_tokens, is_complete=is_complete)
        self._requests.remove(request)
        self._groups.on_end(request)
        finished = self._tiers.add_params(finished)
        self._outbox.note_finished(finished)

    def _release_rows(self, rows: Sequence[int]) -> None:
        """Take rows and blocks from running requests; the worker learns of it in the next message."""
        self._running.remove(rows)
        for row in rows:
            self._kv.free(row)
            self._table.free(row)
        self._in_flight.free_rows(rows)

    # --- first half of a step ---

    def schedule(self) -> Step | None:
        """Decide the next step; None when no request can compute, or a step in flight is to be taken in first."""
        assert not self._in_flight.is_full, "a step is taken in before the next one is scheduled"
        plan = StepPlan(StepBudget(self._limits.max_num_batched_tokens), self._limits.max_num_seqs)
        self._order.refresh(self._running)
        if self._order.queue and len(self._running):
            self._make_room(self._order.queue.peek(), plan)
        num_made_room = plan.num_preemptions
        self._schedule_running(plan)
        if plan.is_empty and len(self._running):
            self._schedule_running(plan)  # prompts waited for decoding requests, and none of these is left
        if plan.num_preemptions == num_made_room:
            self._admission.admit(plan)
        else:
            self._admission.note_preemption(plan)
        if plan.is_empty and len(self._running) and not self._in_flight:
            self._free_stuck(plan)
        self._drafts.add(plan, self._running.rows, self._in_flight.num_steps)
        self._end_overdue()
        return self._freeze(plan)

    def _end_overdue(self) -> None:
        for request in self._requests.take_overdue():
            if request.handle in self._requests and not self._groups.has_started(request):
                waited = f"not admitted within queue_timeout={request.message.queue_timeout_s:g} s"
                self.finish_requests([request.handle], FinishReason.QUEUE_TIMEOUT, waited)

    def _make_room(self, waiting: Request, plan: StepPlan) -> None:
        """Preempt requests of lower priority for one that waits, and let their prompts wait in this step.

        Nothing happens when it would not be admitted even then.
        """
        rows = self._running.rows
        lower_priority = rows[self._order.has_lower_priority(rows, waiting)]
        if not len(lower_priority) or not self._order.may_preempt_others(waiting):
            return
        candidate = self._admission.check_turn(waiting, plan)
        if isinstance(candidate, Blocked):
            return
        if self._admission.check_room(candidate, plan, beside_running=True):
            preemptible = self._order.preemptible(lower_priority, waiting)
            num_held = self._kv.num_blocks_held(self._table.num_tokens[preemptible]).sum(axis=1)
            num_needed = self._kv.num_blocks_held(np.array(len(waiting.token_ids)))
            if not len(preemptible) or (num_held + self._kv.free_counts() < num_needed).any():
                return
            while self._admission.check_room(candidate, plan, beside_running=True) and len(preemptible):
                self._preempt(int(preemptible[-1]), plan)
                preemptible = preemptible[:-1]
                candidate = self._admission.make_candidate(waiting, plan)  # it may have shared blocks of the victim
        plan.preempting = waiting

    def _schedule_running(self, plan: StepPlan) -> None:
        rows = self._running.rows
        plan.add_running(rows, self._num_wanted_tokens(rows, plan))
        missing = num_missing_blocks(rows, self._table, plan, self._kv)
        while self._kv.is_short(missing):
            if not self._groups.release_kept():
                spared = self._tiers.swapping.rows_to_spare()
                victim = choose_victim(self._running, self._table, self._order, spared)
                if would_lose_progress(victim, self._running, self._table, plan):
                    plan.undo_running()
                    return
                self._preempt(victim, plan)
            missing = num_missing_blocks(self._running.rows, self._table, plan, self._kv)
        rows = self._running.rows
        plan.set_new_blocks(self._kv.allocate(rows, missing))
        if not self._kv.can_take_back:
            self._kv.settle_states(rows, self._table.starts(rows) + plan.num_tokens(rows))

    def _free_stuck(self, plan: StepPlan) -> None:
        """All that runs waits for siblings that find no room: the queue has its turn from the beginning."""
        stuck = self._groups.held_back(self._running.rows)
        if not len(stuck):
            return
        for row in stuck[::-1].tolist():
            self._preempt(row, plan)
        self._groups.on_stuck()
        self._schedule_running(plan)
        self._admission.admit(plan)

    def _num_wanted_tokens(self, rows: np.ndarray, plan: StepPlan) -> np.ndarray:
        """[num_rows] tokens each row would compute in this step if the budget were no limit."""
        num_left = self._table.num_left(rows)
        if self._in_flight.looks_ahead:
            self._in_flight.leave_out(rows, num_left)
        is_prefill = num_left > 1
        num_wanted = num_wanted_tokens(rows, num_left, self._table, self._limits.caps, len(self._requests))
        num_wanted = self._groups.mask_incomplete(rows, num_wanted)
        if self._held:
            num_wanted[np.isin(self._table.handle[rows], list(self._held))] = 0
        if self._costs is None and plan.preempting is None:
            return num_wanted
        num_fair = 0 if self._costs is None else self._order.share_step(rows, num_wanted, self._costs)
        is_decoding = (num_wanted > 0) & ~is_prefill
        num_unpaced = 0
        if plan.preempting is not None:
            num_wanted[~is_decoding & self._order.whose_prompts_wait(rows, plan.preempting)] = 0
            if self._order.may_outpace(rows[is_decoding], plan.preempting):
                num_unpaced = len(plan.preempting.token_ids)
        if self._costs is None:
            return num_wanted
        num_decoding = int(np.count_nonzero(is_decoding))
        most = self._limits.max_num_batched_tokens
        if num_decoding:
            num_requests = min(len(rows) + len(self._order.queue), self._limits.max_num_seqs)
            paced = self._costs.prompt_tokens_beside(num_decoding, num_requests, num_fair)
            most = min(most, max(paced, num_unpaced))
        plan.prompts = StepBudget(most)
        if num_decoding == len(rows):
            return num_wanted
        return share_prompt_tokens(num_wanted, is_prefill, plan.prompts, self._order.prompt_order(rows))

    def _preempt(self, row: int, plan: StepPlan) -> None:
        request = self._table.request_on(row)
        plan.undo(row)
        plan.num_preemptions += 1
        suspend(request, self._table)
        is_swapped = self._groups.may_swap(request) and self._tiers.request_preempted(request, plan)
        self._release_rows([row])
        (self._admission.returning if is_swapped else self._order.queue).add(request)
        self._outbox.note_event(request.handle, EventKind.PREEMPTED)

    def _freeze(self, plan: StepPlan) -> Step | None:
        if plan.is_empty and (self._in_flight or not self._tiers.is_waiting):
            return None  # what the worker has in flight brings its reports
        swaps, transfers = self._tiers.take_messages()
        copies = (self._kv.take_block_copies(), swaps.outs, swaps.ins, self._groups.take_row_updates(), transfers)
        number, freed_rows = self._in_flight.begin()
        plan_states = None if self._kv.can_take_back else self._kv.plan_states
        output = plan.freeze(number, freed_rows, self._table, *copies, plan_states)
        if self._tiers.sends_messages:
            output = self._tiers.attach_message(output)
        num_first_tokens = plan.num_first_tokens(output, self._table)
        placements = self._in_flight.note_message(output, plan.rows)
        return Step(output, plan, self._table.handle[plan.rows], swaps.handles, num_first_tokens, placements)

    # --- second half of a step ---

    def update_from_output(
        self, step: Step, output: ModelRunnerOutput, seconds: float | None = None
    ) -> EngineCoreOutputs:
        """Take in the step's tokens: lengths advance, full blocks are published, ended requests leave.

        Args:
            seconds: how long the step took to compute and sample; None = not measured.
        """
        self._in_flight.end(step)
        scheduled, rows = step.output, step.rows
        if self._costs is not None:
            self._costs.record_step(scheduled, seconds)
        self._drafts.take_in(scheduled, output, seconds)
        failed = self._tiers.update_from_output(scheduled, output, seconds)
        if failed:
            alive = rows[self._in_flight.is_alive(step)]
            self._suspend(alive[np.isin(self._table.handle[alive], failed)].tolist())
        if self._tiers.lost:
            self.finish_requests(self._tiers.take_lost(), FinishReason.ERROR, "its KV blocks could not be loaded")
        if output.errors:
            self._end_failed(rows[self._in_flight.is_alive(step)], output.errors)
        is_alive = self._in_flight.is_alive(step)
        sampled = keep_alive(scheduled, rows, output, is_alive)
        num_new = num_kept_tokens(scheduled, output)
        if not is_alive.all():
            rows, num_new = rows[is_alive], num_new[is_alive]
        self._table.num_computed_tokens[rows] += num_new
        if not scheduled.is_sampling.all():
            self._note_prompts(rows)
        sampled, split = self._groups.split_beams(sampled)
        sampled, stops = take_in_turns(sampled, self._table, self._append_tokens)
        self._drafts.take_back_states(scheduled, rows)
        self._kv.cache_full_blocks(rows, self._table.num_computed_tokens[rows], self._table.token_ids)
        handles = self._table.handle[sampled.rows]
        prompt_logprobs = take_prompt_logprobs(output, rows, self._table)
        self._end_stopped(stops)
        self._drafts.give_back_blocks(scheduled, rows)
        token_ids = sampled.token_ids
        for group, samples in split:
            advanced = self._advance(group, samples)
            handles = np.concatenate([handles, advanced.handles])
            token_ids = np.concatenate([token_ids, advanced.token_ids])
        drafts = None if scheduled.drafts is None else step.draft_outcomes(output)
        return self._outbox.make_outputs(
            handles, token_ids, self._make_stats(step), sampled.logprobs, prompt_logprobs, drafts
        )

    def _note_prompts(self, rows: np.ndarray) -> None:
        """Say how far prompts are computed, for requests that ask."""
        table = self._table
        for row in rows[table.num_computed_tokens[rows] < table.num_prompt_tokens[rows]].tolist():
            request = self._requests.get(int(table.handle[row]))
            if request is not None and request.message.sampling_params.return_progress:
                self._outbox.note_event(request.handle, EventKind.PREFILLED, int(table.num_computed_tokens[row]))

    def _advance(self, group: RequestGroup, samples: Sampled) -> Advanced:
        self._order.note_sampled(samples.rows)
        advanced = group.after_sample(samples)
        for finished in advanced.finished:
            request = self._requests[finished.handle]
            self._end(request, finished)
            self._release_rows([request.row])
        return advanced

    def abandon_step(self, step: Step) -> list[int]:
        """A step failed: it never was, and every running request waits again with its tokens.

        How much of the message the worker has applied is unknown, so all rows are given back, with those it freed.

        Returns:
            Handles of the requests that the step held.
        """
        self._in_flight.end(step)
        self._drafts.abandon(step.output)
        self._suspend(self._running.rows.tolist())
        self._in_flight.free_again(step)
        self._admission.forget_kept(step.swapped_out)
        self._tiers.abandon(step.output)
        return [handle for handle in step.handles.tolist() if handle in self._requests]

    def _suspend(self, rows: Sequence[int]) -> None:
        """These running requests wait again with their tokens."""
        requests = [self._table.request_on(row) for row in rows]
        for request in requests:
            suspend(request, self._table)
        self._release_rows(rows)
        for request in requests:
            self._order.queue.add(request)
            self._outbox.note_event(request.handle, EventKind.PREEMPTED)

    def _end_failed(self, rows: np.ndarray, errors: dict[int, str]) -> None:
        """End the requests among these living rows whose token means nothing; the step leaves no trace of them."""
        for row in rows[np.isin(rows, list(errors))].tolist():
            if self._table.handle[row] >= 0:  # else a beam that ended with its siblings
                self.finish_requests([int(self._table.handle[row])], FinishReason.ERROR, errors[row])

    def _append_tokens(self, rows: np.ndarray, token_ids: np.ndarray, turns: np.ndarray | None) -> None:
        self._table.append_tokens(rows, token_ids, turns)
        self._order.note_sampled(rows)

    def _end_stopped(self, stops: list[Stop]) -> None:
        for stop in stops:
            request = self._table.request_on(stop.row)
            self._end(request, FinishedRequest(request.handle, stop.reason, stop.stop_token_id))
        if stops:
            self._release_rows([stop.row for stop in stops])

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Ends and events that happened outside a step (aborts); None when there are none."""
        if not self._outbox:
            return None
        return self._outbox.make_outputs(np.empty(0, np.int64), np.empty(0, np.int32), self._make_stats(None))

    def _make_stats(self, step: Step | None) -> SchedulerStats:
        return SchedulerStats(
            step=max(0, self._in_flight.num_steps - 1),
            num_running=len(self._running),
            num_waiting=len(self._order.queue),
            **self._tiers.counts(is_sent=step is not None and len(step.rows) > 0),  # others may be dropped
            kv_cache_usage=self._kv.usage,
            **({} if step is None else step.counts(self._tiers.swapping.num_bytes)),
            **({} if self._kv.can_take_back else self._kv.state_counts()),
        )

    # --- state ---

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return len(self._requests) > 0

    @property
    def has_transfers(self) -> bool:
        """Whether blocks are under way between the cache and a tier: steps without requests report them."""
        return self._tiers.is_waiting

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self._running), len(self._order.queue)

    def placed_requests(self) -> list[tuple[int, EngineCoreRequest]]:
        """(row, message) of each request that runs."""
        return [(row, self._table.request_on(row).message) for row in self._running.rows.tolist()]

    def unplaced_requests(self) -> list[EngineCoreRequest]:
        """Messages of the requests that wait, the earliest arrival first."""
        return [request.message for request in self._requests.all() if request.row < 0]

    @property
    def reads_logprobs(self) -> bool:
        """Whether what is decided next depends on log-probabilities of the last step."""
        return self._groups.reads_logprobs

    def watch_blocks(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` which blocks can be found, from now on."""
        self._tiers.watch_blocks(recorder)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use, or swapped out.

        Args:
            reset_running_requests: requests give up their blocks and compute them again, so none is in use.
        """
        assert not self._in_flight, "a step is taken in before the cache is reset"
        if reset_running_requests:
            self._groups.release_kept()
            self._suspend(self._running.rows.tolist())
            self._admission.forget_kept(self._admission.returning.handles())
        return not len(self._tiers.swapping) and self._kv.reset_prefix_cache()
