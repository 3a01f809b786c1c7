from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.core.beam_search import BeamSpec
from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.runner_output import ModelRunnerOutput
from quire.errors import ValidationError
from tests.unit.scheduler.harness import (
    Engine,
    expected_answer,
    make_beams,
    make_request,
    make_scheduler,
    make_siblings,
)
from tests.unit.scheduler.pretended_model import expected_beams
from tests.unit.scheduler.test_forks import num_prompt_tokens_computed

PROMPT = list(range(200, 222))
SPEC = BeamSpec(num_beams=4)


def make_engine(**settings: Any) -> Engine:
    return Engine(make_scheduler(**{"num_blocks": 100, "budget": 200, "prefix_caching": False, **settings}))


def check(engine: Engine, search: list[EngineCoreRequest]) -> None:
    for request, (tokens, _) in zip(search, expected_beams(search[0], 100), strict=True):
        beam = engine.finished[request.handle].beam
        assert beam is not None and beam.token_ids.tolist() == tokens


def test_a_step_of_a_search_computes_one_token_for_each_beam():
    engine = make_engine()
    search = make_beams(range(4), PROMPT, SPEC, max_tokens=15)
    engine.add(*search)
    engine.run()
    check(engine, search)
    assert (
        num_prompt_tokens_computed(engine.scheduled, len(PROMPT)) == len(PROMPT) + 3 + 4
    )  # three join, then all sample
    decodes = [step for step in engine.scheduled if step.num_computed_tokens.min() >= len(PROMPT)]
    assert len(decodes) == 14 and all(step.total_num_scheduled_tokens == 4 for step in decodes)
    assert any(step.row_updates.forks for step in decodes)
    assert len(engine.scheduled) == 14 + 3


def test_beams_share_the_pages_of_what_they_have_in_common():
    engine = make_engine(block_size=2, num_blocks=300)
    engine.add(*make_beams(range(4), PROMPT, SPEC, max_tokens=30))
    for _ in range(25):
        engine.step()
    pool = engine.scheduler._kv._pool
    num_pages_alone = (len(PROMPT) + 25) // 2
    assert pool.num_usable_blocks - pool.num_free_blocks < 2 * num_pages_alone


def test_when_one_beam_is_aborted_or_fails_all_end_alike():
    engine = make_engine()
    search = make_beams(range(4), PROMPT, SPEC, max_tokens=15)
    other = make_request(9, 5)
    engine.add(*search, other)
    for _ in range(4):
        engine.step()
    engine.abort(2)
    engine.run()
    assert {engine.finished[handle].finish_reason for handle in range(4)} == {FinishReason.ABORT}
    assert engine.tokens[9] == expected_answer(other, 100)[0] and engine.scheduler._kv.usage == 0.0

    engine = make_engine()
    engine.add(*search)
    for _ in range(4):
        engine.step()
    step = engine.scheduler.schedule()
    assert step is not None
    output = engine.worker.execute(step.output)
    errors = {int(output.rows[1]): "no token", int(output.rows[3]): "no token"}
    failed = ModelRunnerOutput(
        rows=output.rows, sampled_token_ids=output.sampled_token_ids, logprobs=output.logprobs, errors=errors
    )
    engine.receive(engine.scheduler.update_from_output(step, failed))
    assert {engine.finished[handle].finish_reason for handle in range(4)} == {FinishReason.ERROR}
    assert engine.scheduler._kv.usage == 0.0


def test_searches_that_cannot_run_at_once_take_turns():
    engine = make_engine(max_num_seqs=6, num_blocks=24)
    searches = [make_beams(range(first, first + 4), PROMPT, SPEC, max_tokens=9) for first in (0, 4, 8)]
    for search in searches:
        engine.add(*search)
    engine.run()
    for search in searches:
        check(engine, search)


def test_a_search_goes_on_after_a_failed_step():
    engine = make_engine()
    search = make_beams(range(4), PROMPT, SPEC, max_tokens=15)
    engine.add(*search)
    for _ in range(6):
        engine.step()
    step = engine.scheduler.schedule()
    assert step is not None
    engine.scheduler.abandon_step(step)
    engine.worker._apply(step.output)
    engine.run()
    check(engine, search)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_num_seqs": 3}, "max_num_seqs=3"), ({"budget": 7, "max_num_seqs": 8}, "max_num_batched_tokens=7"),
     ({"num_blocks": 12}, "blocks")],
)  # fmt: skip
def test_a_search_whose_beams_could_never_run_together_is_refused(settings: dict[str, Any], message: str):
    engine = make_engine(**settings)
    with pytest.raises(ValidationError, match=message) as caught:
        engine.add(*make_beams(range(4), PROMPT, SPEC, max_tokens=9))
    assert caught.value.field == "beam_width" and caught.value.hint


def test_a_message_without_searches_has_no_updates():
    engine = make_engine()
    engine.add(make_request(0, 5))
    step = engine.step()
    assert step is not None and not step.row_updates.chosen and not len(step.block_copies)
    assert isinstance(step.rows, np.ndarray)


SMALL = {"budget": 60, "enable_chunked_prefill": False, "max_model_len": 45, "prefix_caching": True}


def test_searches_whose_beams_alternate_in_rank_do_not_share_the_rows():
    engine = make_engine(**SMALL, scheduling_policy="shortest", max_num_seqs=3, num_blocks=24, block_size=3)
    engine.add(*make_beams((0, 1), PROMPT[:19], BeamSpec(num_beams=2), max_tokens=3))
    engine.step()
    engine.add(*make_beams((2, 3), PROMPT[:3], BeamSpec(num_beams=2), max_tokens=14))
    engine.step()
    engine.step()
    engine.add(*make_beams((4, 5, 6), PROMPT[:4], BeamSpec(num_beams=3), max_tokens=6))
    engine.run()
    assert len(engine.finished) == 7


def test_a_search_enters_before_a_request_that_ranks_between_its_beams_and_lacks_room():
    engine = make_engine(
        **SMALL, scheduling_policy="shortest", max_num_seqs=2, num_blocks=11, block_size=4, reserve_full_prompt=True
    )
    engine.add(*make_beams((0, 1), PROMPT[:19], BeamSpec(num_beams=2), max_tokens=3))
    engine.step()
    engine.add(make_request(4, PROMPT[:10], max_tokens=3))
    engine.step()
    engine.add(make_request(5, PROMPT + PROMPT[:2], max_tokens=8))
    engine.add(*make_siblings((6, 7), PROMPT + PROMPT[:7], max_tokens=9))
    for _ in range(4):
        engine.step()
    engine.add(*make_beams((8, 9), PROMPT[:15], BeamSpec(num_beams=2), max_tokens=9))
    engine.add(make_request(10, PROMPT[:7], max_tokens=9))
    engine.run()
    assert len(engine.finished) == 9


def test_searches_of_two_tenants_that_take_all_rows_each_advance_when_they_enter():
    engine = make_engine(
        **SMALL, scheduling_policy="fair", max_num_seqs=3, num_blocks=17, block_size=5, max_decode_slowdown=1.0
    )
    engine.add(*make_beams((0, 1, 2), PROMPT[:10], BeamSpec(num_beams=3), max_tokens=14, tenant="a"))
    engine.add(*make_beams((3, 4, 5), PROMPT[:8], BeamSpec(num_beams=3), max_tokens=12, tenant="b"))
    engine.add(*make_beams((6, 7), PROMPT[:17], BeamSpec(num_beams=2), max_tokens=12, tenant="b"))
    engine.run()
    assert len(engine.finished) == 8
