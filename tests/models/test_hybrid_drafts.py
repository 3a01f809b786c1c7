"""Models with recurrent layers draft: a row goes on from the state behind the last draft that stands, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.models.hybrids import HYBRIDS, make_seeing_hybrid
from tests.models.state_spaces import STATE_SPACES, make_state_space
from tests.robustness.oracle import Oracle, drafting
from tests.robustness.speculated_requests import answer_of

PROMPTS = [[5], list(range(7, 40)), [90 + i * i % 97 for i in range(60)]]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True, logprobs=1)
    for seed, temperature in enumerate((0.0, 1.0, 0.7))
]


CASES: list[tuple[str, dict[str, int]]] = [
    ("Qwen3_5Text", {}),
    ("Qwen3_5Text", {"enable_prefix_caching": False}),
    ("Qwen3_5Text", {"max_num_seqs": 2}),
    *((case, {}) for case in STATE_SPACES),
]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_drafts_change_no_byte_of_a_model_with_states(tmp_path: Path, family: str, settings: dict[str, int]):
    make = make_seeing_hybrid if family in HYBRIDS else make_state_space
    make(family, tmp_path)

    def answers(num_times: int) -> list[list[tuple[object, ...]]]:
        options = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 64, **settings}
        with LLM(str(tmp_path), **options) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
            found = [llm.generate(prompts, PARAMS, use_tqdm=False) for _ in range(num_times)]
        return [[answer_of(output) for output in outputs] for outputs in found]

    (expected,) = answers(1)
    sequences = [(prompt, answer[1][1]) for prompt, answer in zip(PROMPTS, expected, strict=True)]
    oracle = Oracle(sequences, vocab_size=200)
    with drafting(oracle):
        found = answers(2)  # the second time from the prefix cache
    assert found == [expected, expected]
    assert oracle.num_drafted > 50
