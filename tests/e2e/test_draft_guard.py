"""A real engine whose proposer is made bad on purpose: the guard closes, and no byte changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.drafts import SpeculatedStep
from quire.core.speculation_stats import Reason
from quire.engine import core_factory
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.spec_decode.controller import SpeculationController
from tests.row_proposer import RowProposer

PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=160, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [300 + number, 400, 500]} for number in range(4)]


class OfAnotherMachine(SpeculationController):
    """Is given the seconds of a machine whose steps last 10 ms, and proposals `proposing_s`."""

    proposing_s = 0.0001

    def record(self, step: SpeculatedStep) -> None:
        proposing_s = 0.0 if step.proposals is None else self.proposing_s
        super().record(dataclasses.replace(step, seconds=0.01 + 0.0005 * int(step.kept.sum()), proposing_s=proposing_s))

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        super().record_skipped(num_steps, 0.01 * num_steps)


class Oracle(RowProposer):
    """Drafts what is known to follow, or the token after it; notes how often it was asked."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(self._next)
        self._texts = {tuple(text[:3]): text for text in texts}
        self.is_bad = False
        self.num_asked = 0

    def _next(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        self.num_asked += 1
        text = self._texts[tuple(token_ids[:3].tolist())]
        drafts = np.array(text[len(token_ids) :][:max_tokens], dtype=np.int32)
        return (drafts + 1) % 300 if self.is_bad else drafts


def test_a_proposer_that_becomes_bad_is_closed(monkeypatch: pytest.MonkeyPatch):
    settings: dict[str, Any] = {"max_model_len": 256, "num_threads": 1, "max_num_seqs": 1}
    settings["enforce_eager"] = True  # nothing is learned from steps that are captured
    with LLM("leaf", **settings) as llm:
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    texts = [[*prompt["prompt_token_ids"], *answer] for prompt, answer in zip(PROMPTS, expected)]
    proposer, controller = Oracle(texts), OfAnotherMachine()

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        drafting = dataclasses.replace(setup, has_proposer=True)
        return make_scheduler(drafting, **{**options, "proposer": proposer, "controller": controller})

    monkeypatch.setattr(core_factory, "make_scheduler", make_drafting)
    with LLM("leaf", **settings) as llm:

        def answers() -> list[list[int]]:
            return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        assert answers() == expected
        assert llm.llm_engine.last_stats.step < 250  # of 640 tokens
        [bucket] = controller.stats().buckets
        assert bucket.ratio > 2 and not bucket.is_closed

        proposer.is_bad, controller.proposing_s, proposer.num_asked = True, 0.004, 0
        assert answers() == expected
        [bucket] = controller.stats().buckets
        assert bucket.is_closed and bucket.ratio < 1
        assert proposer.num_asked < 100  # of 640 steps
        assert controller.stats().reasons[Reason.CLOSED] > 400
