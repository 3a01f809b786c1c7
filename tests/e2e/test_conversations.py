"""Turns of conversations on models with recurrent layers compute their own tokens, and give the bits of a cold run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.e2e.same_bits import Answer, answers
from tests.models.state_spaces import make_state_space

BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "block_size": BLOCK_SIZE, "max_num_seqs": 8, "num_threads": 1,
    "max_num_batched_tokens": 256,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["falcon h1", "mamba2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    make_state_space(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def cold(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS, enable_prefix_caching=False) as llm:
        yield llm


def ask(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)


def words(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 200) for _ in range(count)]


def test_each_turn_computes_its_new_tokens_and_less_than_a_block_of_old_ones(path: Path, cold: LLM) -> None:
    context = words(0, 300)
    with LLM(str(path), **SETTINGS) as llm:
        for turn in range(6):
            (output,) = ask(llm, [context])
            assert answers([output]) == answers(ask(cold, [context]))
            if turn:
                assert output.num_cached_tokens >= len(context) - 30 - BLOCK_SIZE  # the last token was not computed
            context += [*output.outputs[0].token_ids, *words(turn + 1, 30)]


def test_conversations_that_begin_alike_share_the_state_at_the_end_of_the_beginning(path: Path, cold: LLM) -> None:
    system = words(0, 200)
    prompts = [[*system, *words(seed, 40)] for seed in range(1, 6)]
    expected: list[Answer] = answers(ask(cold, prompts))
    with LLM(str(path), **SETTINGS) as llm:
        outputs = [ask(llm, [prompt])[0] for prompt in prompts]
    assert answers(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 192, 192, 192]
    assert outputs[1].prefix_cache.reason == "no_checkpoint" and outputs[1].prefix_cache.position == 192


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_turns_give_the_same_bits(path: Path, cold: LLM, mode: str) -> None:
    prompts = [words(seed, 60 + 9 * seed) for seed in range(8)]
    expected = answers(ask(cold, prompts))
    few = {"num_gpu_blocks_override": 30, "scheduler_reserve_full_isl": False}
    swap = {"preemption_mode": mode, "swap_space": 0.01 if mode == "swap" else 0.0}
    with LLM(str(path), **SETTINGS, **few, **swap) as llm:
        outputs = ask(llm, prompts)
        assert answers(outputs) == expected
        assert answers(ask(llm, prompts)) == expected
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    has_attention = "h1" in (path / "config.json").read_text().lower().replace("_", "")
    assert (num_preemptions > 0) == has_attention, "states do not grow"
