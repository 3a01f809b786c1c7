"""Steps with drafts and chunks of prompts, recorded and replayed: the bits of steps that run call by call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native.library import supported_tiers
from quire.worker.device.recorded_steps import MAX_TOKENS, RecordedSteps
from quire.worker.input_batch import InputBatch
from tests.robustness.oracle import Oracle, drafting

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "block_size": 16, "num_threads": 2}
PROMPTS = [list(range(5, 5 + length)) for length in (1, 70, 220)]  # the last crosses a split of 256
PARAMS = [
    SamplingParams(temperature=(i % 2) * 0.8, seed=i, max_tokens=64, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for i in range(len(PROMPTS))
]


def answers(**settings: Any) -> list[Any]:
    with LLM("leaf", **SETTINGS, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], PARAMS, use_tqdm=False)
    return [
        (list(one.outputs[0].token_ids), repr(one.outputs[0].logprobs), repr(one.prompt_logprobs)) for one in outputs
    ]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How steps with spans ran."""
    found, forward, run = Counter[str](), RecordedSteps.forward, RecordedSteps._run

    def note(graphs: RecordedSteps, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        runs = found["runs"]
        hidden = forward(graphs, batch, wanted)
        if batch.num_tokens > batch.num_reqs:
            is_replay = hidden is not None and found["runs"] == runs
            found["replayed" if is_replay else "recorded" if hidden is not None else "by call"] += 1
            assert hidden is not None or batch.num_tokens > MAX_TOKENS
        return hidden

    def note_run(graphs: RecordedSteps, *args: Any) -> torch.Tensor:
        found["runs"] += 1
        return run(graphs, *args)

    monkeypatch.setattr(RecordedSteps, "forward", note)
    monkeypatch.setattr(RecordedSteps, "_run", note_run)
    return found


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers(enforce_eager=True)


@pytest.mark.parametrize("tier", supported_tiers())
def test_steps_with_drafts_are_replayed_with_the_same_bits(plain: list[Any], counted: Counter[str], tier: str):
    oracle = Oracle(zip(PROMPTS, [tokens for tokens, _, _ in plain], strict=True), vocab_size=200, most=3)
    with drafting(oracle):
        assert answers(kernel_tier=tier) == plain
    assert counted["replayed"] > 10 and oracle.num_drafted > 50


def test_steps_with_prompts_among_decodes_are_replayed_with_the_same_bits(counted: Counter[str]):
    """Of each request all that is sampled and scored; prompts come while others decode, in chunks of 40 tokens."""
    rows = [PROMPTS[i % 3] for i in range(6)]
    params = [
        SamplingParams(temperature=(i % 2) * 0.8, seed=i, max_tokens=8 + i, ignore_eos=True, logprobs=2)
        for i in range(len(rows))
    ]
    found = []
    for is_eager in (True, False):
        with LLM(
            "leaf", **{**SETTINGS, "max_num_seqs": 3}, long_prefill_token_threshold=40, enforce_eager=is_eager
        ) as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in rows], params, use_tqdm=False)
        found.append([(list(one.outputs[0].token_ids), repr(one.outputs[0].logprobs)) for one in outputs])
    assert found[0] == found[1] and counted["replayed"] > 4 and counted["recorded"] <= 4
