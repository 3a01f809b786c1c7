from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError, ValidationError
from quire.scheduler.admission import Candidate, GateDecision
from quire.scheduler.budget import WantedTokens
from quire.scheduler.step_plan import StepPlan
from tests.unit.scheduler.harness import Engine, make_request, make_scheduler


def scheduled_per_step(engine: Engine) -> list[list[int]]:
    return [message.num_scheduled_tokens.tolist() for message in engine.scheduled]


def test_a_prompt_as_long_as_the_model_allows_is_refused_with_the_limit():
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(ValidationError, match=r"12 tokens; with max_model_len=10 .* at most 9.*\nhint: shorten") as e:
        scheduler.add_request(make_request(0, 12))
    assert e.value.field == "prompt"
    with pytest.raises(ValidationError):
        scheduler.add_request(make_request(0, 10))
    scheduler.add_request(make_request(0, 9))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValidationError, match="prompt is empty"):
        make_scheduler().add_request(make_request(0, []))


def test_a_request_that_may_outgrow_the_whole_cache_is_refused_naming_the_fix():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(
        ValidationError, match=r"grow to 25 tokens .* at most 13 .*\nhint: use max_tokens <= 8, or"
    ) as e:
        scheduler.add_request(make_request(0, 5, max_tokens=20))
    assert e.value.field == "max_tokens"


def test_a_prompt_larger_than_the_whole_cache_is_refused_naming_the_prompt():
    with pytest.raises(ValidationError, match="hint: shorten the prompt, or enlarge the KV cache") as refused:
        make_scheduler(num_blocks=4, block_size=4).add_request(make_request(0, 13))
    assert refused.value.field == "prompt"


def test_a_refused_request_leaves_nothing_behind():
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(ValidationError):
        scheduler.add_request(make_request(0, 12))
    assert not scheduler.has_unfinished_requests()
    assert scheduler.take_outputs() is None
    scheduler.add_request(make_request(0, 5))


def test_a_cap_can_stop_a_prompt_before_an_image_that_is_not_encoded_waiting_or_running(monkeypatch):
    images = {0: [6, 11], 1: [3]}  # positions, by request
    encoded: set[tuple[int, int]] = set()

    def stop_before_images(wanted: WantedTokens) -> np.ndarray:
        num_tokens = wanted.num_tokens.copy()
        for i, start in enumerate(wanted.starts.tolist()):
            handle = wanted.request_of(i).handle
            left = [place for place in images.get(handle, []) if (handle, place) not in encoded]
            num_tokens[i] = min([num_tokens[i], *(place - start for place in left)])
        return num_tokens

    monkeypatch.setattr("quire.scheduler.limits.cap_long_prefill", lambda threshold: stop_before_images)
    engine = Engine(make_scheduler(long_prefill_token_threshold=1))
    for handle in (0, 1, 2):
        engine.add(make_request(handle, [handle + 1] * 14, max_tokens=1))
    for places in ([(0, 6), (1, 3)], [(0, 11)], []):
        engine.step()
        encoded.update(places)
    assert scheduled_per_step(engine) == [[6, 3, 14], [5, 11], [3]]
    assert not engine.scheduler.has_unfinished_requests()


def test_the_largest_request_that_is_accepted_runs_to_its_end_alone():
    engine = Engine(make_scheduler(num_blocks=4, block_size=4))
    engine.add(make_request(0, 5, max_tokens=8))
    engine.run()
    assert len(engine.tokens[0]) == 8 and engine.num_preemptions == 0


def test_no_more_requests_run_than_there_are_rows():
    engine = Engine(make_scheduler(max_num_seqs=2))
    engine.add(*(make_request(handle, max_tokens=2) for handle in range(3)))
    engine.step()
    assert engine.scheduler.get_request_counts() == (2, 1)
    engine.run()
    assert sorted(engine.finished) == [0, 1, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    engine = Engine(make_scheduler(budget=8, num_blocks=64))
    engine.add(make_request(0, 3, max_tokens=6))
    engine.step()
    engine.add(make_request(1, 20, max_tokens=1))
    for _ in range(3):
        engine.step()
    assert scheduled_per_step(engine) == [[3], [1, 7], [1, 7], [1, 6]]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole():
    engine = Engine(make_scheduler(budget=20, max_model_len=20, enable_chunked_prefill=False))
    engine.add(make_request(0, 12, max_tokens=2), make_request(1, 12, max_tokens=1), make_request(2, 3, max_tokens=1))
    engine.run()
    assert scheduled_per_step(engine) == [[12], [1, 12, 3]]


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="must fit in one step of max_num_batched_tokens=19"):
        make_scheduler(budget=19, max_model_len=20, enable_chunked_prefill=False)


def test_limits_must_be_resolved():
    with pytest.raises(ConfigError, match="resolve the configuration first"):
        make_scheduler(budget=None)  # type: ignore[arg-type]


def test_a_long_prompt_is_cut_by_the_threshold_only_while_others_want_to_run():
    engine = Engine(make_scheduler(long_prefill_token_threshold=6))
    engine.add(make_request(0, 14, max_tokens=1), make_request(1, 3, max_tokens=2))
    for _ in range(3):
        engine.step()
    assert scheduled_per_step(engine) == [[6, 3], [6, 1], [2]]
    alone = Engine(make_scheduler(long_prefill_token_threshold=6))
    alone.add(make_request(0, 14, max_tokens=1))
    alone.step()
    assert scheduled_per_step(alone) == [[14]]


def test_a_request_waits_until_pages_for_its_whole_prompt_are_free():
    engine = Engine(make_scheduler(num_blocks=9, block_size=4, budget=8))
    engine.add(make_request(0, 16, max_tokens=1), make_request(1, 24, max_tokens=1))
    engine.step()
    engine.step()
    assert engine.scheduler.get_request_counts()[1] == 1
    engine.run()
    assert engine.num_preemptions == 0


def test_pages_that_a_prompt_admitted_in_this_step_still_needs_are_not_promised_again():
    engine = Engine(make_scheduler(num_blocks=9, block_size=4, budget=8, long_prefill_token_threshold=4))
    engine.add(make_request(0, 28, max_tokens=1), make_request(1, 8, max_tokens=1))
    engine.step()
    assert scheduled_per_step(engine) == [[4]]
    engine.run()
    assert list(engine.finished) == [0, 1]


def test_pages_that_a_running_prompt_still_needs_are_not_promised_again():
    engine = Engine(make_scheduler(num_blocks=9, block_size=4, budget=8, long_prefill_token_threshold=4))
    engine.add(make_request(0, 28, max_tokens=1))
    engine.step()
    engine.add(make_request(1, 8, max_tokens=1))
    engine.step()
    assert scheduled_per_step(engine) == [[8], [4]]
    engine.run()
    assert list(engine.finished) == [0, 1]


def test_without_reserve_a_request_starts_when_its_first_chunk_fits():
    settings = {"num_blocks": 9, "block_size": 4, "budget": 20}
    engine = Engine(make_scheduler(**settings, reserve_full_prompt=False))
    engine.add(make_request(0, 16, max_tokens=3), make_request(1, 20, max_tokens=1))
    engine.step()
    assert scheduled_per_step(engine) == [[16, 4]]
    waiting = Engine(make_scheduler(**settings))
    waiting.add(make_request(0, 16, max_tokens=3), make_request(1, 20, max_tokens=1))
    waiting.step()
    assert scheduled_per_step(waiting) == [[16]]


def test_the_watermark_keeps_pages_free_when_a_request_joins_others_but_not_when_it_is_alone():
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, watermark=0.5))
    engine.add(make_request(0, 20, max_tokens=1), make_request(1, 4, max_tokens=1))
    engine.step()
    assert scheduled_per_step(engine) == [[20]]
    engine.run()
    assert sorted(engine.finished) == [0, 1]


class Gate:
    """Lets requests pass, skips them or stops admission, by handle."""

    def __init__(self) -> None:
        self.verdicts: dict[int, GateDecision] = {}

    def __call__(self, candidate: Candidate, plan: StepPlan) -> GateDecision:
        return self.verdicts.get(candidate.request.handle, GateDecision.GO)


def test_a_gate_can_make_one_request_wait_and_it_keeps_its_place():
    gate = Gate()
    engine = Engine(make_scheduler(gates=(gate,), max_num_seqs=2))
    engine.add(*(make_request(handle, max_tokens=1) for handle in range(4)))
    gate.verdicts = {0: GateDecision.SKIP}
    engine.step()
    assert sorted(engine.finished) == [1, 2]
    gate.verdicts = {}
    engine.step()
    assert sorted(engine.finished) == [0, 1, 2, 3]


def test_a_request_that_was_passed_over_still_comes_before_later_arrivals_when_it_runs():
    gate = Gate()
    engine = Engine(make_scheduler(gates=(gate,)))
    engine.add(*(make_request(handle, 3, max_tokens=9) for handle in range(3)))
    gate.verdicts = {1: GateDecision.SKIP}
    first = engine.step()
    gate.verdicts = {}
    engine.step()
    third = engine.step()
    assert first is not None and third is not None
    order = [engine.scheduler._table.request_on(row).handle for row in third.rows.tolist()]
    assert order == [0, 1, 2]


def test_a_gate_can_stop_admission_for_the_step():
    gate = Gate()
    engine = Engine(make_scheduler(gates=(gate,)))
    engine.add(*(make_request(handle, max_tokens=1) for handle in range(3)))
    gate.verdicts = {1: GateDecision.STOP}
    engine.step()
    assert sorted(engine.finished) == [0]
    assert engine.step() is None
    assert engine.scheduler.has_unfinished_requests()


def test_the_budget_is_never_exceeded_and_leftovers_go_to_the_next_request():
    engine = Engine(make_scheduler(budget=10), budget=10)
    engine.add(*(make_request(handle, 4, max_tokens=1) for handle in range(4)))
    engine.run()
    assert scheduled_per_step(engine) == [[4, 4, 2], [2, 4]]


def test_a_budget_smaller_than_the_running_requests_serves_the_oldest_first():
    engine = Engine(make_scheduler(budget=2), budget=2)
    engine.add(*(make_request(handle, 1, max_tokens=3) for handle in range(4)))
    engine.run()
    assert list(engine.finished) == [0, 1, 2, 3]
