"""Families with latent attention as the engine runs them: against transformers, and in pieces with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

from quire import LLM, SamplingParams
from quire.errors import ModelError, UnsupportedError
from tests.models.checkpoints import COMMON, make_tokenizer

TOLERANCE = 1e-4  # of a log-probability, float32
NUM_NEW = 24
HEADS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "minicpm3": (MiniCPM3Config, MiniCPM3ForCausalLM, {**HEADS, "dim_model_base": 32, "tie_word_embeddings": True}),
    "minicpm3 with yarn and biases": (
        MiniCPM3Config,
        MiniCPM3ForCausalLM,
        {**HEADS, "v_head_dim": 12, "attention_bias": True, "rope_scaling": YARN},
    ),
    "minicpm3 without compressed queries": (
        MiniCPM3Config,
        MiniCPM3ForCausalLM,
        {**HEADS, "q_lora_rank": None, "attention_bias": True},
    ),
}
PROMPTS = [
    torch.randint(5, 300, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (1, 2, 17, 33, 70, 150)
]


def write(case: str, directory: Path, **changes: Any) -> Any:
    """A checkpoint with random weights, biases included; returns the model that was written."""
    config_class, model_class, fields = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**{**COMMON, **fields, **changes}, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


def generate(directory: Path, prompts: list[list[int]], **settings: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, greedily; prompts run together."""
    llm = LLM(str(directory), **{"dtype": "float32", "max_model_len": 256, "num_blocks": 120, **settings})
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, logprobs=0, ignore_eos=True)
    results = []
    for request in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params):
        (output,) = request.outputs
        ids = list(output.token_ids)
        assert output.logprobs is not None
        results.append((ids, [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]))
    return results


@pytest.mark.parametrize("backend", ["native_cpu", "torch_reference"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_equal_those_of_transformers(tmp_path: Path, case: str, backend: str):
    model = write(case, tmp_path)
    for prompt, (ids, logprobs) in zip(PROMPTS, generate(tmp_path, PROMPTS, attention_backend=backend), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + ids])).logits[0].log_softmax(dim=-1)[len(prompt) - 1 : -1]
        assert expected.argmax(dim=1).tolist() == ids
        given = expected.gather(1, torch.tensor(ids)[:, None]).flatten() - torch.tensor(logprobs)
        assert not float(given.abs().max()) > TOLERANCE


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 6},
    "preempted": {"num_blocks": 9, "swap_space": 0},
    "swapped": {"num_blocks": 9, "swap_space": 0.01, "preemption_mode": "swap"},
    "without a recording": {"enforce_eager": True},
    "one thread": {"num_threads": 1},
    "portable": {"kernel_tier": "portable"},
}


@pytest.mark.parametrize("dtype, quantization", [("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_a_prompt_has_the_same_bits_however_it_is_computed(tmp_path: Path, dtype: str, quantization: str | None):
    write("minicpm3", tmp_path)
    settings = {"dtype": dtype, "quantization": quantization, "num_threads": 2}
    expected = generate(tmp_path, PROMPTS, **settings)
    ways = WAYS if quantization is None else {way: WAYS[way] for way in ("one by one", "chunks of 7")}
    for way, changes in ways.items():
        assert generate(tmp_path, PROMPTS, **{**settings, **changes}) == expected, way


def test_a_second_prompt_finds_the_blocks_of_the_first(tmp_path: Path):
    write("minicpm3", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, num_blocks=60, block_size=16)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True)
    first, second = (llm.generate({"prompt_token_ids": PROMPTS[-1]}, params)[0] for _ in range(2))
    assert second.num_cached_tokens == 144
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.outputs[0].logprobs == second.outputs[0].logprobs


def test_an_eight_bit_cache_is_refused_by_name(tmp_path: Path):
    write("minicpm3", tmp_path)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='fp8_e4m3' is not supported for latent attention"):
        LLM(str(tmp_path), dtype="bfloat16", kv_cache_dtype="fp8")


def test_weights_of_eight_bits_are_refused_by_name(tmp_path: Path):
    write("minicpm3", tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelError, match=r"quantization_config says the weights are quantized \(fp8\)"):
        LLM(str(tmp_path))
