"""Tiers behind models with windows and recurrent layers: what is loaded gives the bits that were computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.e2e.same_bits import answers
from tests.models.families.cases import CASES

BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "num_threads": 1,
    "max_num_batched_tokens": 96, "gpu_memory_utilization": 0.05,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
MODELS = ["qwen3_5", "gemma3", "mistral"]
PROMPT = [(i * 37) % 250 + 5 for i in range(200)]


def ask(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_turns_are_loaded_after_a_reset_from_host_memory_and_after_a_restart_from_disk(
    tmp_path: Path, name: str
) -> None:
    path, disk = tmp_path / "model", str(tmp_path / "kv")
    path.mkdir()
    CASES[name].write(path)
    with LLM(str(path), **SETTINGS, enable_prefix_caching=False) as cold:
        (first,) = ask(cold, [PROMPT])
        turn = [*PROMPT, *first.outputs[0].token_ids, *PROMPT[:30]]
        asked = [PROMPT, [*PROMPT[:196], 9, 9, 9], turn]
        expected = answers(ask(cold, asked))
    with LLM(str(path), **SETTINGS, kv_disk=disk, kv_offloading_size=0.05) as llm:
        assert answers(ask(llm, [PROMPT])) == expected[:1]
        assert llm.reset_prefix_cache()
        outputs = [output for prompt in asked for output in ask(llm, [prompt])]
        assert answers(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [192, 192, 256]
    with LLM(str(path), **SETTINGS, kv_disk=disk) as llm:
        outputs = ask(llm, asked)
        assert answers(outputs) == expected
        assert [output.num_cached_tokens >= num for output, num in zip(outputs, (192, 192, 256), strict=True)] == [
            True
        ] * 3
