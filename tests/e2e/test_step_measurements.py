"""Steps that are run at start, before there are requests."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine import core_factory
from quire.engine.step_measurements import ROWS, measure_steps
from quire.spec_decode.cost_table import MeasuredStep

PARAMS = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["Once upon a time", "The cat"]


def answers(
    monkeypatch: pytest.MonkeyPatch, method: str | None, tick_s: float
) -> tuple[list[Any], list[list[MeasuredStep]]]:
    """What `leaf` answers, and what it measured, on a clock that goes on by `tick_s` with each reading."""
    measured: list[list[MeasuredStep]] = []
    clock = functools.partial(next, itertools.count(0.0, tick_s))

    def measure(*args: Any) -> list[MeasuredStep]:
        measured.append(measure_steps(*args[:-1], clock))
        return measured[-1]

    monkeypatch.setattr(core_factory, "measure_steps", measure)
    with LLM("leaf", max_model_len=128, num_threads=1, max_num_seqs=4, spec_method=method) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs], measured


def test_steps_of_one_and_of_four_rows_are_measured_where_drafts_are_configured_and_no_answer_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    plain, nothing = answers(monkeypatch, "off", 0.0001)
    assert not nothing
    for method, most in (("suffix", 16), ("eagle", 4)):
        drafting, [measured] = answers(monkeypatch, method, 0.0001)
        assert drafting == plain
        of_one = {step.num_drafts for step in measured if step.num_decoding == 1}
        assert {0, 1, 4, most} <= of_one and {step.num_decoding for step in measured} == {1, 4}
        assert any(step.drafting_s for step in measured) == (method == "eagle")


@pytest.mark.parametrize("tick_s", [ROWS[1] / 8, ROWS[1]])
def test_a_model_with_long_steps_is_measured_in_two(monkeypatch: pytest.MonkeyPatch, tick_s: float):
    """Without the second one nothing would be known of what drafts cost."""
    _, [measured] = answers(monkeypatch, "suffix", tick_s)
    assert [step[:2] for step in measured] == [(1, 0), (1, 4)]


@pytest.mark.parametrize("num_blocks", [4, 20])
def test_an_engine_with_few_blocks_starts_and_answers(num_blocks: int):
    sizes = {"max_model_len": 384, "block_size": 16, "num_gpu_blocks_override": num_blocks, "num_threads": 1}
    with LLM("leaf", max_num_seqs=4, spec_method="suffix", **sizes) as llm:
        [output] = llm.generate("Once", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
