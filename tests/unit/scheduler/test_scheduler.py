from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.core.engine_messages import FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.core.stats import EventKind
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from tests.unit.scheduler.harness import Engine, FakeWorker, expected_answer, make_request, make_scheduler


def one_step(scheduler: Scheduler) -> tuple[Step, ModelRunnerOutput]:
    """Schedule a first step and sample 5 for each row that samples."""
    step = scheduler.schedule()
    assert step is not None
    rows = step.output.rows[step.output.is_sampling]
    return step, ModelRunnerOutput(rows=rows, sampled_token_ids=np.full(len(rows), 5, dtype=np.int32))


def lines_for(index: list[int]) -> LogprobsArrays:
    """Log-probability lines whose token id tells which entry they were made for."""
    column = np.array(index, dtype=np.int32)[:, None]
    return LogprobsArrays(column[:, 0], column, column.astype(np.float32), column)


def test_the_scheduler_is_what_the_engine_core_asks_for():
    scheduler: SchedulerInterface = make_scheduler()
    assert scheduler.schedule() is None
    assert scheduler.take_outputs() is None
    assert not scheduler.has_unfinished_requests()


def test_a_request_is_prefilled_then_decoded_to_its_limit():
    engine = Engine(make_scheduler())
    engine.add(make_request(3, 5, max_tokens=3))
    engine.run()
    assert [message.num_scheduled_tokens.tolist() for message in engine.scheduled] == [[5], [1], [1]]
    assert engine.tokens[3] == expected_answer(make_request(3, 5, max_tokens=3), 100)[0]
    assert engine.finished[3] == FinishedRequest(3, FinishReason.LENGTH)


def test_the_last_token_and_the_end_come_in_one_message():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(3, 5, max_tokens=1))
    outputs = scheduler.update_from_output(*one_step(scheduler))
    assert outputs.handles.tolist() == [3]
    assert outputs.new_token_ids.tolist() == [5]
    assert [end.handle for end in outputs.finished] == [3]


def test_a_part_of_a_prompt_gives_no_token():
    engine = Engine(make_scheduler(budget=4))
    engine.add(make_request(0, 6, max_tokens=1))
    first = engine.step()
    assert first is not None and first.is_sampling.tolist() == [False]
    assert engine.tokens[0] == []


def test_new_requests_are_described_once_and_then_only_their_new_pages():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, 7, max_tokens=4))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert first is not None and second is not None and third is not None
    assert len(first.new_reqs) == 1 and first.new_reqs[0].block_ids[0].tolist() == [1, 2]
    assert second.new_reqs == () and second.new_blocks[0].rows.tolist() == []
    assert third.new_blocks[0].rows.tolist() == [0]
    assert third.new_blocks[0].columns.tolist() == [2]


def test_freed_rows_are_reported_with_the_next_step_even_if_that_comes_late():
    engine = Engine(make_scheduler())
    engine.add(make_request(0, max_tokens=1))
    engine.step()
    assert engine.step() is None
    engine.add(make_request(1, max_tokens=2))
    message, after = engine.step(), engine.step()
    assert message is not None and message.freed_rows.tolist() == [0]
    assert after is not None and after.freed_rows.tolist() == []


def test_steps_are_numbered_from_zero():
    engine = Engine(make_scheduler())
    engine.add(make_request(0, max_tokens=3))
    engine.run()
    assert [message.step for message in engine.scheduled] == [0, 1, 2]


def test_a_long_prompt_says_how_far_it_is_where_that_is_asked_for():
    engine = Engine(make_scheduler(budget=8))
    engine.add(make_request(0, [1] * 20, max_tokens=1, return_progress=True), make_request(1, [2] * 20, max_tokens=1))
    engine.run()
    parts = [(one.handle, one.num_cached_tokens) for one in engine.events if one.kind is EventKind.PREFILLED]
    assert parts == [(0, 8), (0, 16)], "its end comes with the first token"


def test_the_tokens_of_all_steps_are_those_of_prompts_and_answers():
    engine = Engine(make_scheduler(budget=8))
    engine.add(*(make_request(handle, [handle] * length, max_tokens=3) for handle, length in enumerate((1, 5, 20))))
    engine.run()
    num_tokens = sum(stats.num_scheduled_tokens + stats.num_first_tokens for stats in engine.stats)
    assert num_tokens == 1 + 5 + 20 + 3 * 3


def test_events_are_reported_once_each_with_the_cached_tokens():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, [1] * 9, max_tokens=1))
    engine.run()
    engine.add(make_request(1, [1] * 9, max_tokens=1))
    engine.run()
    kinds = [(event.handle, event.kind, event.num_cached_tokens) for event in engine.events]
    assert kinds == [
        (0, EventKind.QUEUED, 0),
        (0, EventKind.SCHEDULED, 0),
        (1, EventKind.QUEUED, 0),
        (1, EventKind.SCHEDULED, 8),
    ]
    times = [event.timestamp for event in engine.events]
    assert times == sorted(times)


def test_a_prefix_hit_saves_its_tokens_and_is_counted():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, [1] * 9, max_tokens=1))
    engine.run()
    engine.add(make_request(1, [1] * 9 + [2, 3], max_tokens=1))
    engine.run()
    assert engine.scheduled[-1].num_scheduled_tokens.tolist() == [3]
    assert engine.scheduled[-1].num_computed_tokens.tolist() == [8]
    assert [(stats.prefix_cache_queries, stats.prefix_cache_hits) for stats in engine.stats[:1]] == [(9, 0)]
    assert sum(stats.prefix_cache_hits for stats in engine.stats) == 8


def test_equal_prompts_in_one_step_do_not_read_each_other_s_unwritten_pages():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(*(make_request(handle, [1] * 9, max_tokens=6) for handle in range(3)))
    engine.run()
    assert engine.scheduled[0].num_scheduled_tokens.tolist() == [9, 9, 9]
    assert engine.tokens[0] == engine.tokens[1] == engine.tokens[2]


def test_a_request_that_must_not_read_the_cache_computes_its_whole_prompt():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, [1] * 9, max_tokens=1))
    engine.run()
    engine.add(make_request(1, [1] * 9, max_tokens=1, prompt_logprobs=0))
    engine.run()
    assert engine.scheduled[-1].num_scheduled_tokens.tolist() == [9]


def test_an_aborted_waiting_request_ends_without_running():
    engine = Engine(make_scheduler())
    engine.add(make_request(0))
    engine.abort(0)
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.step() is None
    assert engine.finished[0] == FinishedRequest(0, FinishReason.ABORT)


def test_an_aborted_running_request_frees_its_pages_before_the_next_step():
    engine = Engine(make_scheduler(num_blocks=4, block_size=4))
    engine.add(make_request(0, 9, max_tokens=4), make_request(1, 9, max_tokens=1))
    engine.step()
    engine.abort(0)
    message = engine.step()
    assert message is not None and [new.request_id for new in message.new_reqs] == ["r1"]
    assert engine.finished.keys() == {0, 1}


def test_a_request_aborted_while_its_step_runs_gets_no_token_and_publishes_nothing():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, 9), make_request(1, 9, max_tokens=1))
    engine.step(abort_in_flight=[0])
    assert engine.tokens[0] == [] and len(engine.tokens[1]) == 1
    assert engine.finished[0].finish_reason is FinishReason.ABORT
    assert engine.scheduler._kv._pool.num_cached_blocks == 2


def test_log_probabilities_stay_with_their_entries_when_a_neighbour_was_aborted():
    scheduler = make_scheduler()
    for handle in range(4):
        scheduler.add_request(make_request(handle))
    step, output = one_step(scheduler)
    output = dataclasses.replace(output, logprobs=lines_for([0, 1, 3]))
    scheduler.finish_requests([1, 2], FinishReason.ABORT)
    outputs = scheduler.update_from_output(step, output)
    assert outputs.handles.tolist() == [0, 3]
    assert outputs.logprobs is not None
    assert outputs.logprobs.index.tolist() == [0, 1]
    assert outputs.logprobs.token_ids[:, 0].tolist() == [0, 3]


def test_prompt_log_probabilities_carry_the_handle_and_never_repeat_a_position():
    scheduler = make_scheduler(budget=4)
    scheduler.add_request(make_request(9, 6, prompt_logprobs=0, max_tokens=2))
    step, output = one_step(scheduler)
    outputs = scheduler.update_from_output(
        step, dataclasses.replace(output, prompt_logprobs={0: lines_for([1, 2, 3, 4])})
    )
    ((handle, lines),) = outputs.prompt_logprobs
    assert (handle, lines.index.tolist()) == (9, [1, 2, 3, 4])
    step, output = one_step(scheduler)
    outputs = scheduler.update_from_output(step, dataclasses.replace(output, prompt_logprobs={0: lines_for([4, 5])}))
    assert outputs.prompt_logprobs[0][1].index.tolist() == [5]


def test_ends_for_another_reason_are_reported_with_it_and_unknown_handles_are_ignored():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(0))
    scheduler.finish_requests([0, 0, 17], FinishReason.STOP)
    outputs = scheduler.take_outputs()
    assert outputs is not None
    assert outputs.finished == (FinishedRequest(0, FinishReason.STOP),)
    assert len(outputs.handles) == len(outputs.new_token_ids) == 0
    assert scheduler.take_outputs() is None


def test_stats_describe_the_state_after_the_step():
    engine = Engine(make_scheduler(max_num_seqs=2, num_blocks=11, block_size=4))
    engine.add(*(make_request(handle, 8, max_tokens=5) for handle in range(3)))
    engine.step()
    stats = engine.stats[-1]
    assert (stats.step, stats.num_running, stats.num_waiting, stats.num_scheduled_tokens) == (0, 2, 1, 16)
    assert stats.kv_cache_usage == pytest.approx(0.4)


def test_the_prefix_cache_is_reset_only_when_no_request_holds_pages():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, [1] * 9, max_tokens=2))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(make_request(1, [1] * 9, max_tokens=1))
    engine.run()
    assert engine.scheduled[-1].num_computed_tokens.tolist() == [0]


def test_a_reset_of_running_requests_makes_them_compute_again_and_changes_no_answer():
    engine = Engine(make_scheduler(block_size=4))
    requests = [make_request(handle, [handle + 1] * 9, max_tokens=6) for handle in range(3)]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.scheduler._kv.usage == 0.0 and engine.scheduler.get_request_counts() == (0, 3)
    engine.run()
    assert all(engine.tokens[one.handle] == expected_answer(one, 100)[0] for one in requests)
    assert [engine.events_of(0)[-2], engine.events_of(0)[-1]] == [EventKind.PREEMPTED, EventKind.SCHEDULED]


def test_scheduling_twice_or_taking_in_another_step_is_a_broken_invariant():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(0))
    step, output = one_step(scheduler)
    with pytest.raises(AssertionError, match="taken in before the next"):
        scheduler.schedule()
    scheduler.update_from_output(step, output)
    with pytest.raises(AssertionError, match="taken in once"):
        scheduler.update_from_output(step, output)


def test_a_worker_that_answers_for_other_rows_is_caught():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(0))
    step, _ = one_step(scheduler)
    wrong = ModelRunnerOutput(rows=np.array([4]), sampled_token_ids=np.array([5]))
    with pytest.raises(AssertionError, match="exactly the rows that sample"):
        scheduler.update_from_output(step, wrong)


def test_the_pretended_worker_notices_a_page_of_another_prefix():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(0, 9, max_tokens=3))
    engine.step()
    worker: FakeWorker = engine.worker
    worker.slots[1, 2] = 12345
    with pytest.raises(AssertionError, match="reads keys of another prefix at position 2"):
        engine.step()


def test_a_request_whose_token_means_nothing_ends_alone_and_publishes_nothing():
    scheduler = make_scheduler()
    for handle in (0, 1):
        scheduler.add_request(make_request(handle, 8))
    step, output = one_step(scheduler)
    failed_row = int(step.output.rows[0])
    outputs = scheduler.update_from_output(step, dataclasses.replace(output, errors={failed_row: "NaN"}))
    assert outputs.finished == (FinishedRequest(0, FinishReason.ERROR, error="NaN"),)
    assert outputs.handles.tolist() == [1]
    scheduler.add_request(make_request(0, 8))
    step, _ = one_step(scheduler)
    assert step.output.num_computed_tokens[step.output.num_scheduled_tokens > 1].tolist() == [0]
    assert failed_row in step.output.freed_rows


def test_an_error_of_a_request_aborted_meanwhile_is_ignored():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(0))
    step, output = one_step(scheduler)
    scheduler.finish_requests([0], FinishReason.ABORT)
    outputs = scheduler.update_from_output(step, dataclasses.replace(output, errors={int(step.output.rows[0]): "NaN"}))
    assert [end.finish_reason for end in outputs.finished] == [FinishReason.ABORT]
