"""Engines that share a directory: a prompt that one computed is loaded by the other, with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError
from tests.e2e.test_connector import BLOCK_SIZE, NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS, PROMPT, Core
from tests.unit.scheduler.harness import make_request

NUM_LOADED = NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE


def shared(path: Path, **more: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(path)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra, **more}


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[bytes], int]:
    plain = Core()
    answer = plain.answer(0)
    plain.core.shutdown()
    return answer


def test_a_prompt_prefilled_by_one_engine_is_decoded_by_another_with_the_same_bytes(expected, tmp_path):
    tokens, logprobs, num_computed = expected
    prefill = Core(kv_transfer_config=shared(tmp_path, kv_role="kv_producer", engine_id="prefill"))
    decode = Core(kv_transfer_config=shared(tmp_path, kv_role="kv_consumer"))
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
    prefill.core.add_request(make_request(0, PROMPT, max_tokens=1, extra_args={"kv_transfer_params": ask}))
    ends = []
    while prefill.core.has_work():
        outputs = prefill.core.step()
        ends += [] if outputs is None else outputs.finished
    params = ends[0].kv_transfer_params
    assert params is not None and params["do_remote_prefill"] and params["remote_engine_id"] == "prefill"
    assert params["remote_num_tokens"] == NUM_LOADED
    again, again_logprobs, num_again = decode.answer(1, extra_args={"kv_transfer_params": params})
    assert again == tokens and again_logprobs == logprobs
    assert num_again == num_computed - NUM_LOADED
    foreign = {**params, "remote_layout": "0" * 64, "remote_num_tokens": 10**9}
    other, _, _ = decode.answer(2, extra_args={"kv_transfer_params": foreign})
    assert other == tokens, "nothing is waited for that is of another layout"
    for core in (prefill, decode):
        core.core.shutdown()


def test_damaged_and_lost_files_are_computed_again(expected, tmp_path):
    tokens, logprobs, num_computed = expected
    first = Core(kv_transfer_config=shared(tmp_path))
    assert first.answer(0) == expected
    first.core.shutdown()
    paths = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(paths) == (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1) // BLOCK_SIZE
    for path in paths[::2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    second = Core(kv_transfer_config=shared(tmp_path))
    assert second.answer(0) == (tokens, logprobs, num_computed), "a load that fails is computed as a whole"
    again, again_logprobs, num_again = second.answer(1)
    assert again == tokens and again_logprobs == logprobs and num_again == num_computed - NUM_LOADED
    second.core.shutdown()


def test_engines_of_other_layouts_share_a_directory_and_no_block(expected, tmp_path):
    first, second = (Core(kv_transfer_config=shared(tmp_path), kv_cache_dtype=one) for one in ("auto", "fp8"))
    assert first.answer(0) == expected
    _, _, num_computed = second.answer(0)
    assert num_computed == expected[2] and len(list(tmp_path.glob("*/layout.json"))) == 2
    for core in (first, second):
        core.core.shutdown()


def test_llm_shows_what_a_response_carries_and_refuses_parameters_without_a_connector(tmp_path):
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    settings: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_model_len": 256}
    with LLM("leaf", kv_transfer_config=shared(tmp_path), **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.kv_transfer_params is not None and output.kv_transfer_params["do_remote_prefill"]
    assert list(tmp_path.glob("*/*.safetensors")), "what was computed is saved when the engine has ended"
    with LLM("leaf", **settings) as llm, pytest.raises(ValidationError, match="this engine has none"):
        llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)


def test_a_directory_is_needed():
    with pytest.raises(ConfigError, match="needs shared_storage_path"):
        Core(kv_transfer_config={"kv_connector": "SharedStorageConnector"})
