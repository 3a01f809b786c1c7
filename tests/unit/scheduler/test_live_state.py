"""What people see of a scheduler: who runs, who waits and why, which blocks are whose."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.live_state import CACHED, FREE, MAX_CELLS, MAX_PREFIXES, MAX_QUEUED, OTHER, SHARED
from quire.core.runner_output import ModelRunnerOutput
from quire.engine.step_watch import LOOKED_AT_S, StepWatch
from quire.scheduler.live_state import live_state
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from tests.unit.scheduler.harness import make_request, make_scheduler


def run_step(scheduler: Scheduler) -> Step:
    """One step in which every row samples token 7."""
    step = scheduler.schedule()
    assert step is not None
    rows = step.output.rows[step.output.is_sampling]
    sampled = np.full(len(rows), 7, dtype=np.int32)
    scheduler.update_from_output(step, ModelRunnerOutput(rows=rows, sampled_token_ids=sampled))
    return step


def test_rows_blocks_and_queue_are_those_of_the_scheduler():
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=17, budget=16)
    for handle, size in ((1, 9), (2, 6), (3, 5)):
        scheduler.add_request(make_request(handle, size, max_tokens=8))
    blocked = run_step(scheduler).plan.blocked
    state = live_state(scheduler, blocked)
    assert (state.num_running, state.num_waiting, state.num_swapped) == (2, 1, 0)
    first, second = state.batch
    assert (first.id, first.phase, first.prompt_tokens, first.computed_tokens) == ("r1", "decode", 9, 9)
    assert (first.output_tokens, first.num_blocks, second.num_blocks) == (1, 3, 2)
    (queued,) = state.queue
    assert (queued.id, queued.phase, queued.reason, queued.behind) == ("r3", "waiting", "rows", "")
    (blocks,) = state.blocks
    assert (blocks.num_blocks, blocks.used, blocks.cached, blocks.free) == (16, 5, 0, 11)
    assert blocks.owners.count(first.row) == 3 and blocks.owners.count(second.row) == 2
    assert blocks.owners.count(FREE) == 11 and len(blocks.ages) == len(blocks.owners) == 16
    ages = dict(zip(blocks.owners, blocks.ages))
    assert (ages[first.row], ages[second.row]) == (100, 0), "the row placed first is the oldest"


def test_those_behind_a_refused_request_say_whom_they_wait_for():
    scheduler = make_scheduler(max_num_seqs=1)
    for handle in (1, 2, 3):
        scheduler.add_request(make_request(handle))
    assert [one.reason for one in live_state(scheduler, None).queue] == ["arrived"] * 3
    blocked = run_step(scheduler).plan.blocked
    assert [(one.id, one.behind) for one in live_state(scheduler, blocked).queue] == [("r2", ""), ("r3", "r2")]


def test_shared_and_cached_blocks_and_the_tree_of_prefixes_are_shown():
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    prefix = list(range(200, 208))
    scheduler.add_request(make_request(1, [*prefix, 1, 2, 3, 4, 5], max_tokens=1))
    run_step(scheduler)
    (blocks,) = live_state(scheduler, None).blocks
    assert (blocks.used, blocks.cached) == (0, 3) and blocks.owners.count(CACHED) == 3
    assert {age for owner, age in zip(blocks.owners, blocks.ages) if owner == CACHED} == {0, 50, 100}
    for handle in (2, 3):
        scheduler.add_request(make_request(handle, [*prefix, handle, 9, 9, 9, 9], max_tokens=8, cache_salt=None))
    run_step(scheduler)
    state = live_state(scheduler, None)
    assert state.blocks[0].owners.count(SHARED) == 2 and OTHER not in state.blocks[0].owners
    trunk = next(one for one in state.prefixes.nodes if one.parent == 0)
    assert (trunk.num_blocks, trunk.cached_blocks, trunk.num_children) == (2, 2, 3)
    assert {one.parent for one in state.prefixes.nodes if one is not trunk} == {trunk.id}
    assert state.prefixes.num_cached_blocks == 5 and not state.prefixes.is_cut


def test_every_list_is_bounded():
    scheduler = make_scheduler(num_blocks=3000, block_size=1, max_num_seqs=8, budget=2048, max_model_len=64)
    for handle in range(400):
        scheduler.add_request(make_request(handle, [handle + 1, *range(100, 104)], max_tokens=1))
    for _ in range(30):
        blocked = run_step(scheduler).plan.blocked
    state = live_state(scheduler, blocked)
    assert state.num_waiting == 160 and len(state.queue) == MAX_QUEUED
    assert len(state.blocks[0].owners) <= MAX_CELLS and state.blocks[0].blocks_per_cell == 3
    assert len(state.prefixes.nodes) == MAX_PREFIXES and state.prefixes.is_cut


def test_tenants_of_the_fair_policy_come_in_the_order_of_their_turns():
    scheduler = make_scheduler(max_num_seqs=2, scheduling_policy="fair")
    for handle, tenant in enumerate(("red", "red", "red", "blue")):
        scheduler.add_request(make_request(handle, tenant=tenant, weight=2.0 if tenant == "red" else 1.0))
    run_step(scheduler)
    tenants = {one.name: one for one in live_state(scheduler, None).tenants}
    assert (tenants["red"].weight, tenants["red"].running, tenants["red"].waiting) == (2.0, 1, 2)
    assert min(one.served for one in tenants.values()) == 0.0
    assert live_state(make_scheduler(), None).tenants == []


def test_a_swapped_request_and_its_blocks_are_shown():
    scheduler = make_scheduler(num_blocks=9, num_swap_blocks=16, preemption_mode="swap", max_num_seqs=4)
    for handle in (1, 2):
        scheduler.add_request(make_request(handle, 12, max_tokens=20))
    watch, state = StepWatch(), live_state(scheduler, None)
    for _ in range(12):
        watch.note(step := run_step(scheduler), 0.5)
        state = live_state(scheduler, step.plan.blocked)
        if state.num_swapped:
            break
    (queued,) = state.queue
    assert (queued.phase, queued.id, state.swap_blocks) == ("swapped", "r2", 16) and state.swap_blocks_used > 0
    assert [chunk.handle for chunk in watch.look()[1] if chunk.kind == "swapped"] == [2]


def test_looking_changes_nothing():
    def answers(is_watched: bool) -> list[tuple[list[int], list[int]]]:
        scheduler = make_scheduler(num_blocks=12, max_num_seqs=3, budget=8)
        for handle in range(6):
            scheduler.add_request(make_request(handle, 9, max_tokens=6))
        steps = []
        while scheduler.has_unfinished_requests():
            step = run_step(scheduler)
            steps.append((step.handles.tolist(), step.output.num_scheduled_tokens.tolist()))
            if is_watched:
                live_state(scheduler, step.plan.blocked)
        return steps

    assert answers(True) == answers(False)


def test_steps_are_noted_while_someone_looks():
    now = [0.0]
    watch, scheduler = StepWatch(lambda: now[0]), make_scheduler(budget=6)
    scheduler.add_request(make_request(1, 10, max_tokens=4))
    now[0] = 2.0
    assert watch.note(run_step(scheduler), 0.5) and watch.note(run_step(scheduler), 0.25)
    assert watch.note(run_step(scheduler), 0.25)
    steps, chunks = watch.look()
    assert [(one.num_tokens, one.num_prompt_tokens, one.seconds) for one in steps] == [
        (6, 6, 0.5), (4, 4, 0.25), (1, 0, 0.25)
    ]  # fmt: skip
    assert [(one.handle, one.first, one.num_tokens, one.start_s) for one in chunks] == [(1, 0, 6, 1.5), (1, 6, 4, 1.75)]
    now[0] += LOOKED_AT_S
    assert not watch.note(run_step(scheduler), 0.25)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_an_idle_scheduler_can_be_looked_at(max_num_seqs):
    state = live_state(make_scheduler(max_num_seqs=max_num_seqs), None)
    assert (state.num_running, state.batch, state.queue, state.prefixes.nodes) == (0, [], [], [])
    assert state.process.rss_bytes > 0 and state.process.num_threads > 0
