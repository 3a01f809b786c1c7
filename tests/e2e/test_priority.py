"""Requests by priority: the urgent first, and everybody the same tokens as without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError

PROMPTS = [f"Once upon a time there was a fox number {i}" for i in range(6)]
PRIORITIES = [4, 0, 2, -1, 2, 3]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.8 if i % 2 else 0.0, seed=i, ignore_eos=True, logprobs=1)
    for i in range(6)
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("leaf", scheduling_policy="priority", max_num_seqs=2, num_gpu_blocks_override=64) as llm:
        yield llm


def test_the_order_changes_and_no_answer_does(llm: LLM):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=PRIORITIES)
    with LLM("leaf", max_num_seqs=2, num_gpu_blocks_override=64) as usual:
        expected = usual.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs[0] for output in outputs] == [output.outputs[0] for output in expected]
    started = sorted(range(6), key=lambda i: outputs[i].metrics.first_token_ts)
    assert [set(started[:2]), set(started[2:4]), set(started[4:])] == [{1, 3}, {2, 4}, {0, 5}]  # two rows


def test_what_an_urgent_arrival_stopped_goes_on_with_the_same_tokens(llm: LLM):
    engine = llm.llm_engine
    alone = llm.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)
    for i in (0, 1):
        engine.add_request(f"lax {i}", PROMPTS[i], PARAMS[i], priority=5)
    for _ in range(4):
        engine.step()
    engine.add_request("urgent", PROMPTS[2], PARAMS[2], priority=-5)
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert list(finished)[-1] == "lax 1" and finished["lax 1"].metrics.num_preemptions == 1
    found = [finished[name].outputs[0] for name in ("lax 0", "lax 1", "urgent")]
    assert found == [output.outputs[0] for output in alone]


def test_a_priority_out_of_range_is_refused(llm: LLM):
    with pytest.raises(ValidationError, match="priority=8388608"):
        llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False, priority=[1 << 23])
