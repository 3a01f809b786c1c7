"""A scheduler with a pretended worker: every message is checked, every key and value is traced to its prefix.

The worker's KV cache holds, for each slot, a fingerprint of the tokens up to that position. A row may only read
slots that hold the fingerprints of its own tokens, so a block shared, reused or published wrongly is found at once.
With several KV cache groups each has fingerprints of its own, and reads what its next query sees. The state of a
recurrent group is one fingerprint, that of all tokens before, in the first slot of its block.
Sampled tokens depend on the tokens before them alone, so what a request gets is known beforehand.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.beam_search import BeamSpec, num_top_tokens
from quire.core.drafts import DraftController, DraftProposer
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.kv_spec import PoolSize
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import BlockCopies, SchedulerOutput
from quire.core.stats import EventKind, RequestEvent, SchedulerStats
from quire.scheduler import setup
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.setup import SchedulerSetup
from tests.unit.scheduler.cache_groups import FULL as FULL
from tests.unit.scheduler.cache_groups import Group as Group
from tests.unit.scheduler.cache_groups import first_token_seen as first_token_seen
from tests.unit.scheduler.cache_groups import make_kv_cache_config as make_kv_cache_config
from tests.unit.scheduler.invariants import check_invariants as check_invariants
from tests.unit.scheduler.kv_event_consumer import KVEventConsumer
from tests.unit.scheduler.pretended_model import VOCAB_SIZE as VOCAB_SIZE
from tests.unit.scheduler.pretended_model import expected_answer as expected_answer
from tests.unit.scheduler.pretended_model import next_token as next_token
from tests.unit.scheduler.pretended_model import top_logprobs

EOS = 0


def make_setup(
    *,
    num_blocks: int = 64,
    num_swap_blocks: int = 0,
    block_size: int = 4,
    max_model_len: int = 100,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_steps_in_flight: int = 1,
    waits_for_tokens: bool = False,
    prefix_caching: bool = True,
    watermark: float = 0.0,
    groups: Sequence[Group] = (FULL,),
    more_pools: Sequence[PoolSize] = (),
    checkpoint_interval: int = 0,
    max_step_drafts: int | None = None,
    **scheduler_settings: Any,
) -> SchedulerSetup:
    return SchedulerSetup(
        scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **scheduler_settings),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            watermark=watermark,
            prefix_cache_retention_interval=checkpoint_interval,
        ),
        kv_cache=make_kv_cache_config(num_blocks, block_size, groups, num_swap_blocks, more_pools),
        max_model_len=max_model_len,
        max_step_drafts=max_step_drafts,
        max_steps_in_flight=max_steps_in_flight,
        waits_for_tokens=waits_for_tokens,
    )


def make_scheduler(
    *,
    gates: Sequence[Any] = (),
    proposer: DraftProposer | None = None,
    tier: KVTier | None = None,
    controller: DraftController | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler of the setup that `settings` describe, whose clock counts its readings."""
    ticks = itertools.count()
    made_from = dataclasses.replace(make_setup(**settings), has_proposer=proposer is not None)
    return setup.make_scheduler(made_from, lambda: float(next(ticks)), gates, proposer, tier, controller)


def make_request(
    handle: int,
    prompt: Sequence[int] | int = 5,
    *,
    max_tokens: int | None = 4,
    ignore_eos: bool = True,
    cache_salt: str | None = None,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    tenant_policy: str = "fcfs",
    queue_timeout_s: float = 0.0,
    template_id: int = 0,
    fork_group: int | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """A request; a number as prompt stands for that many tokens that no other handle's prompt begins with."""
    token_ids = [(handle * 7 + i) % 1000 + 100 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return EngineCoreRequest(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array(token_ids, dtype=np.int32),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params),
        seed=handle,
        eos_token_id=EOS,
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
        tenant_weight=weight,
        tenant_policy=tenant_policy,
        queue_timeout_s=queue_timeout_s,
        template_id=template_id,
        fork_group=fork_group,
    )


def make_siblings(handles: Sequence[int], prompt: Sequence[int], **params: Any) -> list[EngineCoreRequest]:
    """Requests with one prompt, which share its blocks."""
    return [make_request(handle, prompt, fork_group=handles[0], **params) for handle in handles]


def make_beams(handles: Sequence[int], prompt: Sequence[int], spec: BeamSpec, **params: Any) -> list[EngineCoreRequest]:
    """The requests of one beam search."""
    one = make_request(0, prompt, **params).sampling_params
    num_ends = len({*(one.stop_token_ids or ()), *(() if one.ignore_eos else (EOS,))})
    num_top = num_top_tokens(spec.num_beams, num_ends)
    return make_siblings(handles, prompt, beam_search=spec, temperature=0.0, logprobs=num_top, **params)


def running_fingerprints(token_ids: np.ndarray, group: int = 0) -> list[int]:
    """Fingerprint of each prefix of the tokens, as a KV cache group keeps it."""
    fingerprints, crc = [], group
    for token in token_ids.tolist():
        crc = zlib.crc32(int(token).to_bytes(4, "little"), crc)
        fingerprints.append(crc)
    return fingerprints


@dataclass
class _Row:
    token_ids: np.ndarray
    block_ids: list[list[int]]  # per group
    num_logprobs: int | None = None


class FakeWorker:
    """Applies messages in the promised order and refuses those that break a promise."""

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[Group] = (FULL,), num_swap_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.rows: dict[int, _Row] = {}
        self.slots = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.host_slots = np.full((num_swap_blocks, block_size), -1, dtype=np.int64)
        self._unsure_rows: set[int] = set()
        self.num_copies = 0
        self.may_be_empty = False

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._swap(scheduled.swap_outs, self.slots, self.host_slots)
        self._swap(scheduled.swap_ins, self.host_slots, self.slots)
        self.host_slots[scheduled.swap_ins.source_ids] = -1
        self._apply(scheduled)
        assert len(set(scheduled.rows.tolist())) == len(scheduled.rows)
        assert len(scheduled.rows) or self.may_be_empty, "a step in which nothing computes"
        assert (scheduled.num_scheduled_tokens >= 1).all()
        assert scheduled.num_scheduled_tokens.sum() == scheduled.total_num_scheduled_tokens
        self._write(scheduled)
        for row, computed in zip(scheduled.rows.tolist(), scheduled.num_computed_tokens.tolist(), strict=True):
            self._check_reads(row, computed)
        return self._sample(scheduled)

    def spoil(self, scheduled: SchedulerOutput) -> None:
        """Fail in a step: what it would write is ruined, and of its rows nobody knows which were applied."""
        self.host_slots[scheduled.swap_outs.target_ids] = -2
        self.slots[scheduled.swap_ins.target_ids] = -2
        self.slots[scheduled.block_copies.target_ids] = -2
        for blocks in (*(new.block_ids for new in scheduled.new_blocks), *self._new_pages(scheduled)):
            self.slots[blocks] = -2
        for states in scheduled.states:
            self.slots[states.write_block_ids] = -2
        for block_ids in () if scheduled.drafts is None else scheduled.drafts.state_block_ids:
            self.slots[block_ids] = -2
        self._unsure_rows.update(scheduled.freed_rows.tolist(), (new.row for new in scheduled.new_reqs))

    def _new_pages(self, scheduled: SchedulerOutput) -> list[np.ndarray]:
        """Blocks of placed requests that hold none of their computed tokens yet."""
        computed = dict(zip(scheduled.rows.tolist(), scheduled.num_computed_tokens.tolist(), strict=True))
        return [
            block_ids[-(-computed[new.row] // self.block_size) :]
            for new in scheduled.new_reqs
            for block_ids in new.block_ids
        ]

    def _swap(self, copies: BlockCopies, sources: np.ndarray, targets: np.ndarray) -> None:
        assert len(set(copies.target_ids.tolist())) == len(copies), "two pages are copied onto one"
        assert self.slots is not sources or 0 not in copies.source_ids, "the null page is swapped out"
        assert self.slots is not targets or 0 not in copies.target_ids, "the null page is overwritten"
        targets[copies.target_ids] = sources[copies.source_ids]

    def _apply(self, scheduled: SchedulerOutput) -> None:
        for fork in scheduled.row_updates.forks:
            assert fork.row not in [one.source_row for one in scheduled.row_updates.forks], "a row is source and target"
            tokens = self.rows[fork.source_row].token_ids[: fork.num_tokens]
            self.rows[fork.row].token_ids = tokens.copy()
            self.rows[fork.row].block_ids = [ids.tolist() for ids in fork.block_ids]
        for chosen in scheduled.row_updates.chosen:
            for row, position, token in zip(chosen.rows.tolist(), chosen.positions, chosen.token_ids, strict=True):
                tokens = self.rows[row].token_ids[:position]
                self.rows[row].token_ids = np.append(tokens, token)
        for row in scheduled.freed_rows.tolist():
            if row in self._unsure_rows:
                self.rows.pop(row, None)
            else:
                del self.rows[row]
        self._unsure_rows.clear()
        for new in scheduled.new_reqs:
            assert new.row not in self.rows, "a row was given out twice"
            assert new.row in scheduled.rows
            block_ids = [ids.tolist() for ids in new.block_ids]
            self.rows[new.row] = _Row(new.token_ids.copy(), block_ids, new.sampling_params.logprobs)
            assert len(new.block_ids) == len(self.groups)
        for group, blocks in enumerate(scheduled.new_blocks):
            for row, column, block_id in zip(
                blocks.rows.tolist(), blocks.columns.tolist(), blocks.block_ids.tolist(), strict=True
            ):
                assert column == len(self.rows[row].block_ids[group])
                assert block_id != 0, "the null page was given out"
                self.rows[row].block_ids[group].append(block_id)
        self._copy_blocks(scheduled)

    def _copy_blocks(self, scheduled: SchedulerOutput) -> None:
        sources, targets = scheduled.block_copies.source_ids, scheduled.block_copies.target_ids
        assert len(set(targets.tolist())) == len(targets) == len(sources), "a page is copied onto twice"
        assert not set(sources.tolist()) & set(targets.tolist()), "a page is source and target"
        assert 0 not in sources and 0 not in targets, "the null page is copied"
        self.num_copies += len(sources)
        self.slots[targets] = self.slots[sources]

    def _update_states(self, scheduled: SchedulerOutput) -> None:
        """Every request goes on from a state of exactly its tokens; nobody writes what another reads."""
        state_groups = [group for group, (kind, _) in enumerate(self.groups) if kind == "state"]
        ends = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        drafts = drafts_by_row(scheduled)
        for number, (group, states) in enumerate(zip(state_groups, scheduled.states, strict=True)):
            reads, writes = states.read_block_ids.tolist(), states.write_block_ids.tolist()
            assert len(set(writes)) == len(writes) == len(scheduled.rows), "two requests write one state"
            assert all(block not in writes or block == writes[i] for i, block in enumerate(reads)), "a race for a state"
            assert 0 not in writes and 0 not in reads, "the null page as a state"
            before_drafts = draft_states_by_row(scheduled, number)
            spare = [block for blocks in before_drafts for block in blocks]
            used = {0, *reads, *writes}
            assert len({*spare, *used}) == len(used) + len(spare), "drafts overwrite a state that is used"
            left = []
            for i, row in enumerate(scheduled.rows.tolist()):
                start = int(scheduled.num_computed_tokens[i])
                token_ids = np.concatenate([self.rows[row].token_ids, drafts[i]])
                fingerprints = running_fingerprints(token_ids[: int(ends[i])], group)
                assert (reads[i] == -1) == (start == 0), "a request begins anew, or does not"
                assert start == 0 or self.slots[reads[i], 0] == fingerprints[start - 1], "a state of other tokens"
                left.append(fingerprints[-1])
                assert len(before_drafts[i]) == len(drafts[i]), "a draft without a state before it"
                self.slots[before_drafts[i]] = -3
                self.slots[before_drafts[i], 0] = fingerprints[-1 - len(drafts[i]) : -1]
            self.slots[writes] = -3
            self.slots[writes, 0] = left

    def _write(self, scheduled: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        self._update_states(scheduled)
        for row, start, count, drafts in zip(
            scheduled.rows.tolist(),
            scheduled.num_computed_tokens.tolist(),
            scheduled.num_scheduled_tokens.tolist(),
            drafts_by_row(scheduled),
            strict=True,
        ):
            state = self.rows[row]
            token_ids = np.concatenate([state.token_ids, drafts])
            assert start + count <= len(token_ids), "computing tokens that do not exist"
            assert not len(drafts) or start + count == len(token_ids), "drafts behind tokens that are not computed"
            for group, block_ids in enumerate(state.block_ids):
                if self.groups[group][0] == "state":
                    continue
                fingerprints = running_fingerprints(token_ids[: start + count], group)
                for position in range(start, start + count):
                    slot = (block_ids[position // self.block_size], position % self.block_size)
                    assert slot[0] != 0, "a token is written to the null page"
                    assert slot not in written, "two rows, or two groups, write one slot"
                    written.add(slot)
                    self.slots[slot] = fingerprints[position]

    def _check_reads(self, row: int, num_computed: int) -> None:
        state = self.rows[row]
        for group, block_ids in enumerate(state.block_ids):
            if self.groups[group][0] == "state":
                continue
            fingerprints = running_fingerprints(state.token_ids[:num_computed], group)
            for position in range(first_token_seen(self.groups[group], num_computed), num_computed):
                slot = (block_ids[position // self.block_size], position % self.block_size)
                assert self.slots[slot] == fingerprints[position], (
                    f"row {row} reads keys of another prefix at position {position} in group {group}"
                )

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        drafts = drafts_by_row(scheduled)
        ends = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens - [len(ids) for ids in drafts]
        lengths = np.array([len(self.rows[row].token_ids) for row in scheduled.rows.tolist()])
        assert np.array_equal(scheduled.is_sampling, ends == lengths)
        assert np.array_equal(scheduled.is_prefill, lengths - scheduled.num_computed_tokens > 1)
        sampling = np.flatnonzero(scheduled.is_sampling).tolist()
        rows = scheduled.rows[scheduled.is_sampling]
        per_row = [self._accepted(int(scheduled.rows[i]), drafts[i].tolist()) for i in sampling]
        tokens = np.array([token for ids in per_row for token in ids], dtype=np.int32)
        for row, ids, given in zip(rows.tolist(), per_row, [drafts[i] for i in sampling], strict=True):
            if self.rows[row].num_logprobs is None:  # a beam's token is chosen by the scheduler
                self.rows[row].token_ids = np.append(self.rows[row].token_ids, ids).astype(np.int32)
            if len(given):
                self._give_back_pages(self.rows[row])
        if scheduled.drafts is None:
            return ModelRunnerOutput(rows=rows, sampled_token_ids=tokens, logprobs=self._logprobs(rows, tokens))
        starts = np.cumsum([0, *map(len, per_row)]).astype(np.int32)
        logprobs = None
        if (lines := self._logprobs(rows, tokens[starts[:-1]])) is not None:  # beams, which have one token each
            logprobs = dataclasses.replace(lines, index=starts[lines.index])
        return ModelRunnerOutput(rows=rows, sampled_token_ids=tokens, sampled_start_loc=starts, logprobs=logprobs)

    def _accepted(self, row: int, drafts: list[int]) -> list[int]:
        """What the model samples while drafts are what it sampled, and the token after them."""
        token_ids, accepted = self.rows[row].token_ids, list[int]()
        while True:
            accepted.append(next_token(np.append(token_ids, np.array(accepted, np.int32)).astype(np.int32)))
            if len(accepted) > len(drafts) or accepted[-1] != drafts[len(accepted) - 1]:
                return accepted

    def _give_back_pages(self, state: _Row) -> None:
        """Blocks for drafts that were not accepted belong to the row no longer; its newest token is not computed."""
        num_blocks = -(-(len(state.token_ids) - 1) // self.block_size)
        for (kind, _), block_ids in zip(self.groups, state.block_ids, strict=True):
            if kind != "state":
                del block_ids[num_blocks:]

    def _logprobs(self, rows: np.ndarray, tokens: np.ndarray) -> LogprobsArrays | None:
        wanting = [i for i, row in enumerate(rows.tolist()) if self.rows[row].num_logprobs is not None]
        if not wanting:
            return None
        width = max(self.rows[int(rows[i])].num_logprobs or 0 for i in wanting)
        ids = np.full((len(wanting), 1 + width), -1, dtype=np.int32)
        scores = np.full((len(wanting), 1 + width), np.nan, dtype=np.float32)
        for line, i in enumerate(wanting):
            state = self.rows[int(rows[i])]
            top = top_logprobs(state.token_ids)[: state.num_logprobs]
            ids[line, : 1 + len(top)] = [tokens[i], *(token for _, token in top)]
            scores[line, : 1 + len(top)] = [0.0, *(score for score, _ in top)]
        return LogprobsArrays(np.array(wanting, np.int32), ids, scores, np.zeros_like(ids))


def drafts_by_row(scheduled: SchedulerOutput) -> list[np.ndarray]:
    """The draft tokens of each row of a step."""
    if scheduled.drafts is None:
        return [np.empty(0, dtype=np.int32)] * len(scheduled.rows)
    return np.split(scheduled.drafts.token_ids, np.cumsum(scheduled.drafts.counts)[:-1])


def draft_states_by_row(scheduled: SchedulerOutput, number: int) -> list[list[int]]:
    """The blocks for states before drafts of each row of a step, in one of the groups that have states."""
    if scheduled.drafts is None:
        return [[]] * len(scheduled.rows)
    blocks = scheduled.drafts.state_block_ids[number]
    return [ids.tolist() for ids in np.split(blocks, np.cumsum(scheduled.drafts.counts)[:-1])]


@dataclass
class Engine:
    """Steps a scheduler with a fake worker and collects what the front-end would see."""

    scheduler: Scheduler
    worker: FakeWorker = field(init=False)
    duration: Callable[[SchedulerOutput], float | None] = lambda scheduled: None
    swap_durations: Callable[[SchedulerOutput], tuple[float | None, float | None]] | None = None
    budget: int = 1 << 30
    groups: Sequence[Group] = (FULL,)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedRequest] = field(default_factory=dict)
    events: list[RequestEvent] = field(default_factory=list)
    stats: list[SchedulerStats] = field(default_factory=list)
    scheduled: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        kv = self.scheduler._kv
        num_swap_blocks = sum(pool.num_blocks for pool in self.scheduler._tiers.swapping._pools)
        self.worker = FakeWorker(len(kv._pool.ref_counts()), kv.block_size, self.groups, num_swap_blocks)
        self.consumer = KVEventConsumer(self.scheduler)

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.tokens[request.handle] = []

    def abort(self, *handles: int) -> None:
        self.scheduler.finish_requests(handles, FinishReason.ABORT)

    def step(self, abort_in_flight: Sequence[int] = ()) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        check_invariants(self.scheduler, self.groups)
        self.consumer.check()
        if step is None:
            self.receive(self.scheduler.take_outputs())
            return None
        scheduled = step.output
        assert scheduled.total_num_scheduled_tokens <= self.budget, "scheduled over budget"
        self.scheduled.append(scheduled)
        output = self.worker.execute(scheduled)
        if self.swap_durations is not None:
            swap_out_s, swap_in_s = self.swap_durations(scheduled)
            output = dataclasses.replace(output, swap_out_s=swap_out_s, swap_in_s=swap_in_s)
        self.abort(*abort_in_flight)
        self.receive(self.scheduler.update_from_output(step, output, self.duration(scheduled)))
        check_invariants(self.scheduler, self.groups)
        self.consumer.check()
        return scheduled

    def receive(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            return
        for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
            assert handle not in self.finished, "a token after the end"
            self.tokens[handle].append(token)
        for end in outputs.finished:
            assert end.handle not in self.finished, "a request ended twice"
            self.finished[end.handle] = end
        self.events.extend(outputs.events)
        self.stats.append(outputs.stats)

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.step()
                return
            assert self.step() is not None, "requests are left, but nothing is scheduled"
        raise AssertionError("the requests do not end")

    def drain(self) -> None:
        """Take in what is in flight: here nothing is."""

    def events_of(self, handle: int) -> list[EventKind]:
        return [event.kind for event in self.events if event.handle == handle]

    def fail_step(self) -> None:
        """Schedule a step that the worker fails in after it has swapped and written anything."""
        step = self.scheduler.schedule()
        check_invariants(self.scheduler, self.groups)
        if step is None:
            return
        self.worker.spoil(step.output)
        self.scheduler.abandon_step(step)
        check_invariants(self.scheduler, self.groups)

    @property
    def num_preemptions(self) -> int:
        return sum(stats.num_preemptions for stats in self.stats)

    @property
    def num_swap_preemptions(self) -> int:
        return sum(stats.num_swap_preemptions for stats in self.stats)


def same_message(first: SchedulerOutput, second: SchedulerOutput) -> bool:
    """True when two messages are equal to the last byte (parameters compared by identity of their values)."""
    return _plain(first) == _plain(second)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
