"""A proposer that drafts the last three tokens again: answers are the same bytes as without it, in fewer steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.engine import core_factory
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from tests.e2e.tiny_model import write_tiny_model
from tests.row_proposer import RowProposer

SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "num_threads": 1, "max_num_seqs": 8, "block_size": 16, "speculative_config": "off"
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "logprobs": 0},
    "seeded and sharp": {"temperature": 0.2, "min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "likes to repeat": {"temperature": 0.7, "repetition_penalty": 0.5, "logprobs": 1},
    "bias": {"temperature": 0, "logit_bias": {7: 4.0}, "min_tokens": 6},
    "bad words": {"temperature": 0, "bad_words": ["the", "a b"]},
    "stop string": {"temperature": 0, "stop": ["e"], "min_tokens": 3},
    "stop id": {"temperature": 0.9, "stop_token_ids": list(range(0, 250, 9))},
    "short": {"temperature": 0, "max_tokens": 2},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "(ab){2,9}"}},
}


class Again(RowProposer):
    """Drafts the last three tokens again; notes how many it has drafted."""

    def __init__(self) -> None:
        super().__init__(self._again)
        self.num_drafted = 0

    def _again(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        drafts = np.array(token_ids[-3:][:max_tokens])
        self.num_drafted += len(drafts)
        return drafts


def answers(model: str) -> tuple[list[Any], int]:
    """What every kind of request gets, and how many steps that took."""
    kinds = {name: kind for name, kind in KINDS.items() if name != "grammar" or model != "leaf"}  # once is enough
    prompts = [{"prompt_token_ids": [5, 6, 7] * (2 + i % 4) + [20 + i]} for i in range(len(kinds))]
    common = {"max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**{**common, "seed": i, **kind}) for i, kind in enumerate(kinds.values())]
    params.append(SamplingParams(temperature=1.0, seed=99, max_tokens=40, logprobs=1))  # may end by itself
    prompts.append({"prompt_token_ids": [5, 6, 7, 8]})
    with LLM(model, **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_steps = llm.llm_engine.last_stats.step
    found = [
        (one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason, repr(one.logprobs))
        for one in (output.outputs[0] for output in outputs)
    ]
    return found, num_steps


@pytest.fixture(scope="module", params=["leaf", "tiny"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "leaf":
        return "leaf"
    root = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_model(root / "model", Path(root / "marker")))


def test_the_last_three_tokens_drafted_again_change_no_byte(model: str, monkeypatch: pytest.MonkeyPatch):
    expected, num_steps = answers(model)
    proposer = Again()

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        return make_scheduler(dataclasses.replace(setup, has_proposer=True), **{**options, "proposer": proposer})

    monkeypatch.setattr(core_factory, "make_scheduler", make_drafting)
    found, num_steps_with_drafts = answers(model)
    assert found == expected
    assert proposer.num_drafted > 100
    assert num_steps_with_drafts < num_steps


class Recorded(RowProposer):
    """Drafts from recorded answers; notes which of their tokens were a bonus or a correction.

    Args:
        answers: prompt -> tokens, and for each place the likeliest token.
        drafts_likeliest: the second draft is the likeliest token, where another was sampled.
    """

    def __init__(self, answers: dict[tuple[int, ...], tuple[list[int], list[int]]], drafts_likeliest: bool) -> None:
        super().__init__(self._of_answer)
        self._answers = answers
        self._drafts_likeliest = drafts_likeliest
        self._last: tuple[tuple[int, ...], int, int] = ((), 0, 0)
        self.unlikely: dict[str, int] = {"bonus": 0, "correction": 0}

    def _of_answer(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        prompt = next(one for one in self._answers if one == tuple(token_ids[: len(one)].tolist()))
        tokens, likeliest = self._answers[prompt]
        done = len(token_ids) - len(prompt)
        of, before, num_drafts = self._last
        if of == prompt and tokens[done - 1] != likeliest[done - 1]:
            self.unlikely["bonus" if done - before > num_drafts else "correction"] += 1
        drafts = tokens[done : done + 3]
        if self._drafts_likeliest:
            drafts = [*tokens[done : done + 1], *likeliest[done + 1 : done + 2]]
        self._last = prompt, done, len(drafts)
        return np.array(drafts[:max_tokens], dtype=np.int32)


@pytest.fixture(scope="module")
def sampled() -> tuple[list[Any], list[Any]]:
    """Requests at temperature 1, and their answers without drafts."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 300 + i]} for i in range(6)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=True, logprobs=1) for i in range(6)]
    with LLM("leaf", **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = {
        tuple(output.prompt_token_ids): (
            list(output.outputs[0].token_ids),
            [next(token for token, one in line.items() if one.rank == 1) for line in output.outputs[0].logprobs],
        )
        for output in outputs
    }
    return [prompts, params], [outputs, answers]


def check_with(proposer: Recorded, sampled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompts, params), (expected, _) = sampled

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        return make_scheduler(dataclasses.replace(setup, has_proposer=True), **{**options, "proposer": proposer})

    monkeypatch.setattr(core_factory, "make_scheduler", make_drafting)
    with LLM("leaf", **{**SETTINGS, "max_num_seqs": 1}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, want in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert repr(output.outputs[0].logprobs) == repr(want.outputs[0].logprobs)


def test_the_first_token_behind_a_prompt_is_sampled(sampled, monkeypatch):
    answers = sampled[1][1]
    assert any(tokens[0] != likeliest[0] for tokens, likeliest in answers.values()), "not each is the likeliest"
    check_with(Recorded(answers, drafts_likeliest=False), sampled, monkeypatch)


def test_the_token_behind_drafts_that_are_all_right_is_sampled(sampled, monkeypatch):
    proposer = Recorded(sampled[1][1], drafts_likeliest=False)
    check_with(proposer, sampled, monkeypatch)
    assert proposer.unlikely["bonus"] > 3 and not proposer.unlikely["correction"]


def test_the_token_in_place_of_a_wrong_draft_is_sampled(sampled, monkeypatch):
    proposer = Recorded(sampled[1][1], drafts_likeliest=True)
    check_with(proposer, sampled, monkeypatch)
    assert proposer.unlikely["correction"] > 3
