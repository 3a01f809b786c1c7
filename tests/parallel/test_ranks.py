"""Several ranks give the bytes of one. `make test-parallel` tries every family, format and circumstance."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError
from quire.executor import rank_process
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.replay import Replay
from quire.models.decoder import DecoderForCausalLM
from tests.e2e import serving
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.parallel.circumstances import CIRCUMSTANCES, SETTINGS, Answers, answers
from tests.parallel.ranks import children_of, is_alive, ranks_as_threads

VOCAB_SIZE = 3000


@pytest.fixture(scope="module")
def expected() -> Answers:
    return answers("leaf", VOCAB_SIZE, 1, structured=True)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "name"),
    effort(
        ((2, 1, "swapped, with suffixes"), (1, 2, "swapped, with suffixes")),
        ((2, 1, "as one"), (4, 1, "preempted"), (1, 4, "host memory"), (2, 2, "swapped, with suffixes")),
    ),
)
def test_answers_are_those_of_one_rank(expected: Answers, num_ranks: int, num_stages: int, name: str):
    """Cached prefixes, penalties, draws, patterns and log-probabilities of prompts among them."""
    found = answers("leaf", VOCAB_SIZE, num_ranks, num_stages=num_stages, structured=True, **CIRCUMSTANCES[name])
    assert found == expected


def test_weights_that_are_quantized_while_loading_are_the_same_codes_on_any_number_of_ranks():
    settings = {"quantization": "int8", "enforce_eager": True}
    assert answers("leaf", VOCAB_SIZE, 3, **settings) == answers("leaf", VOCAB_SIZE, 1, **settings)


@pytest.mark.parametrize("name", effort(("jamba",), ("mamba", "deepseek_v3", "qwen3_next", "gpt_oss")))
def test_experts_recurrent_layers_and_latents_are_those_of_one_rank(tmp_path: Path, name: str):
    """On two stages of two ranks."""
    CASES[name].write(tmp_path)
    assert answers(tmp_path, 320, 2, num_stages=2) == answers(tmp_path, 320, 1)


def test_a_step_that_fails_on_one_rank_ends_the_group_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with ranks_as_threads(), LLM("leaf", tensor_parallel_size=2, **SETTINGS) as llm:
        params = SamplingParams(max_tokens=2, temperature=0)
        llm.generate(prompt, params, use_tqdm=False)

        compute_logits = DecoderForCausalLM.compute_logits

        def fail_on_rank_0(*inputs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise ValueError("a kernel that is broken")
            return compute_logits(*inputs)

        monkeypatch.setattr(DecoderForCausalLM, "compute_logits", fail_on_rank_0)
        with pytest.raises(EngineDeadError, match="logits failed on rank 0.*a kernel that is broken"):
            llm.generate(prompt, params, use_tqdm=False)


def test_what_keeps_a_rank_from_loading_is_raised_and_no_process_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_process, "RANK_MODULE", "quire.version")  # has no main
    before = children_of(os.getpid())
    with pytest.raises(EngineDeadError, match="process of rank 1 exited during startup: it exited with code 1"):
        LLM("leaf", tensor_parallel_size=2, **SETTINGS)
    assert children_of(os.getpid()) == before


def test_what_ends_while_its_step_is_under_way_leaves_the_others_as_they_are(tmp_path: Path):
    """Two stages have two steps under way; a request is aborted in between, and another one gets its row. The recording
    of their schedule replays without stages.
    """
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, presence_penalty=0.5)
    prompts = [{"prompt_token_ids": list(range(10 + i, 40 + 3 * i))} for i in range(5)]
    settings = {**SETTINGS, "max_num_seqs": 4}
    with LLM("leaf", **settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with ranks_as_threads(), LLM("leaf", pipeline_parallel_size=2, flight_recorder=str(tmp_path), **settings) as llm:
        engine, found = llm.llm_engine, dict[str, Any]()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        for step in range(200):
            if step == 3:
                engine.abort_request(["1"])
            found.update(
                (output.request_id, output.outputs[0].token_ids) for output in engine.step() if output.finished
            )
            if not engine.has_unfinished_requests():
                break
    assert {number: found[str(number)] for number in (0, 2, 3, 4)} == {n: expected[n] for n in (0, 2, 3, 4)}
    replayed = Replay(read_recording(tmp_path)).run()
    assert replayed.first_difference is None and replayed.num_steps > 12


@pytest.mark.parametrize("size", effort(("pipeline",), ("pipeline", "tensor")))
def test_streams_survive_the_death_of_a_rank_in_a_process_of_its_own(size: str):
    requests = serving.make_requests(12, 40)
    expected = serving.expected_answers("leaf", requests)
    engine = AsyncLLM.from_config(build_config(model="leaf", **{f"{size}_parallel_size": 2}, **serving.SETTINGS))
    killed: list[int] = []

    def other_rank(engine: AsyncLLM) -> int:
        assert engine.core_pid is not None
        (rank,) = children_of(engine.core_pid)
        killed.append(rank)
        return rank

    try:
        core = engine.core_pid
        num_different = asyncio.run(serving.rounds(engine, requests, expected, 1, random.Random(1), victim=other_rank))
        assert num_different == 0 and engine.num_restarts == 1
        assert engine.core_pid is not None and engine.core_pid != core
        (rank,) = children_of(engine.core_pid)
    finally:
        engine.shutdown()
    for pid in (*killed, rank):  # ranks end with their core
        while is_alive(pid):
            time.sleep(0.01)
