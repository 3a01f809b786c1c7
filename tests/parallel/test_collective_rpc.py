"""`collective_rpc` and `apply_model` reach every rank of every replica, in their order; errors name the rank."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError, QuireServerError, UnsupportedError, ValidationError
from tests.parallel import rank_functions
from tests.parallel.ranks import ranks_as_threads

SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 2, "num_threads": 1, "num_gpu_blocks_override": 64, "block_size": 16,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def token_ids(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("num_stages", [1, 2], ids=["TP 2", "TP 2, PP 2"])
def test_every_rank_is_called_between_two_steps(num_stages: int):
    size = 2 * num_stages
    with ranks_as_threads(), LLM(
        "leaf", tensor_parallel_size=2, pipeline_parallel_size=num_stages, **SETTINGS
    ) as llm:  # fmt: skip
        expected = token_ids(llm)
        found = llm.collective_rpc(rank_functions.describe, args=("a",), kwargs={"times": 2})
        assert [one["rank"] for one in found] == list(range(size)) and found[0]["words"] == ["a", "a"]
        assert len(llm.collective_rpc("kv_cache_specs")) == len(llm.collective_rpc("weight_bytes")) == size
        with pytest.raises(QuireServerError, match=f"rank {size - 1}: KeyError"):
            llm.collective_rpc(rank_functions.fail_on, args=(size - 1,))
        with pytest.raises(ValidationError, match="rank 0: the result of collective_rpc"):
            llm.collective_rpc(rank_functions.model_of)
        with pytest.raises(UnsupportedError, match="no code is sent"):
            llm.apply_model(lambda model: 1)
        large = llm.collective_rpc(rank_functions.describe, args=("b" * 100_000,), kwargs={"times": 40})
        assert all(len(one["words"]) == 40 for one in large), "more than fits a mailbox"
        counts = llm.apply_model(rank_functions.count_weights)
        assert len(counts) == size and min(counts) > 0
        assert token_ids(llm) == expected, "ranks are where they were"


def test_ranks_in_processes_answer_and_one_that_dies_ends_the_call():
    with LLM("leaf", tensor_parallel_size=2, **SETTINGS) as llm:
        found = llm.collective_rpc(rank_functions.describe, args=("a",))
        assert [one["rank"] for one in found] == [0, 1] and found[0]["pid"] == os.getpid() != found[1]["pid"]
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.collective_rpc(rank_functions.die_on, args=(1,))
        assert time.monotonic() - start < 5


def test_replicas_are_called_in_their_order():
    with LLM("leaf", data_parallel_size=2, **SETTINGS) as llm:
        found = llm.collective_rpc(rank_functions.describe, args=("a",))
        assert len({one["pid"] for one in found}) == 2 == llm.get_world_size()
        with pytest.raises(QuireServerError, match="replica 0: rank 0: KeyError"):
            llm.collective_rpc(rank_functions.fail_on, args=(0,))
        with pytest.raises(TimeoutError):
            llm.collective_rpc(rank_functions.wait, timeout=0.05, args=(0.5,))
        assert len(token_ids(llm)) == 4
        with pytest.raises(EngineDeadError):
            llm.collective_rpc(rank_functions.die_on, args=(0,))


def test_an_asynchronous_engine_is_called_and_does_not_repeat_what_killed_it():
    engine = AsyncLLM.from_config(build_config(model="leaf", **SETTINGS))
    try:
        asyncio.run(call_and_kill(engine))
    finally:
        engine.shutdown()


async def call_and_kill(engine: AsyncLLM) -> None:
    (found,) = await engine.collective_rpc(rank_functions.describe, args=("a",))
    assert found["pid"] != os.getpid()
    with pytest.raises(TimeoutError):
        await engine.collective_rpc(rank_functions.wait, timeout=0.05, args=(0.3,))
    with pytest.raises(EngineDeadError):
        await engine.collective_rpc(rank_functions.die_on, args=(0,))
    assert (await engine.collective_rpc(rank_functions.describe, args=("a",)))[0]["pid"] != found["pid"]
