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
