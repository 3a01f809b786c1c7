"""Engines that are told how drafts stand: by ratios of probabilities, in blocks, or by what is typical."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.drafts import Proposals, SpeculatedStep, StepLoad
from quire.engine import core_factory
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from tests.row_proposer import RowProposer

SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_threads": 1, "max_num_seqs": 8, "block_size": 16}
WAYS: dict[str, dict[str, Any]] = {
    "rejection": {"acceptance": "rejection"},
    "block": {"rejection_sample_method": "block"},
    "typical": {"acceptance": "typical", "posterior_threshold": 0.0, "posterior_alpha": 0.0},
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0, "structured_outputs": {"regex": "(ab){2,9}"}},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "structured_outputs": {"regex": "[ab]{12}"}},
]
IS_GREEDY = [kind["temperature"] == 0 for kind in KINDS]


class CountsDrafts:
    """A controller that has all drafts verified, and counts those that stood."""

    def __init__(self) -> None:
        self.num_accepted = 0

    def clock(self) -> float:
        return 0.0

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        return 3

    def num_watched(self) -> int:
        return 0

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        raise AssertionError("nothing is watched")

    def num_skipped(self) -> int:
        return 0

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        raise AssertionError("none is")

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        return proposals.counts

    def record(self, step: SpeculatedStep) -> None:
        self.num_accepted += int(step.accepted.sum())


def again(token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
    return np.array(token_ids[-3:][:max_tokens])


def answers(way: dict[str, Any] | None = None) -> list[Any]:
    """What every kind of request gets."""
    params = [
        SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": i, **kind}) for i, kind in enumerate(KINDS)
    ]
    prompts = [{"prompt_token_ids": [5, 6, 7] * (2 + i % 4) + [20 + i]} for i in range(len(KINDS))]
    settings = SETTINGS if way is None else {**SETTINGS, "speculative_config": {"method": "ngram", **way}}
    with LLM("leaf", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(one.text, tuple(one.token_ids), repr(one.logprobs)) for one in (output.outputs[0] for output in outputs)]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> CountsDrafts:
    """That of engines made from now on, which draft the last three tokens again."""
    made = CountsDrafts()

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        options = {**options, "proposer": RowProposer(again), "controller": made}
        return make_scheduler(dataclasses.replace(setup, has_proposer=True), **options)

    monkeypatch.setattr(core_factory, "make_scheduler", make_drafting)
    return made


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_greedy_requests_get_the_same_bytes_and_others_a_repeatable_answer(
    way: dict[str, Any], plain: list[Any], controller: CountsDrafts
) -> None:
    found = answers(way)
    for one, wanted, is_greedy in zip(found, plain, IS_GREEDY, strict=True):
        assert not is_greedy or one == wanted
    assert controller.num_accepted > 10
    assert found[-1][0].strip("ab") == "" and len(found[-1][0]) == 12
    assert answers(way) == found


def test_the_configured_rule_is_the_one_that_decides(plain: list[Any], controller: CountsDrafts) -> None:
    assert answers({}) == plain  # sampled: every byte
    by_ratios, typical = answers(WAYS["rejection"]), answers(WAYS["typical"])
    assert by_ratios[3] != plain[3]
    tokens = [7, 20 + 3, *typical[3][1]]  # behind the end of the prompt
    for start in range(3, 23, 4):  # whatever is possible is typical: three drafts and a bonus in every step
        assert tokens[start : start + 3] == tokens[start - 3 : start]
