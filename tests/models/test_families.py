"""Every family against transformers in float32, from a checkpoint on disk, whole and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.config.families.registry import parse_config
from quire.config.model import LoadConfig
from quire.distributed.parallel_context import ParallelContext
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from quire.models.model_dir import read_model_dir
from tests.models.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.models.stepping import Stepper

TOLERANCE = 1e-4  # of a log-probability, float32
NUM_TOKENS = 150
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama sharded": ("llama", {"max_shard_size": "40KB"}),
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama yarn": ("llama", {"rope_scaling": YARN}),
    "llama dynamic, within": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2 with windows": ("qwen2", WINDOWS),
    "qwen3 untied with biases and windows": (
        "qwen3",
        {"attention_bias": True, "tie_word_embeddings": False, **WINDOWS},
    ),
    "one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "one layer": ("qwen3", {"num_hidden_layers": 1, "num_key_value_heads": 4}),
}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    arch = parse_config(read_model_dir(directory).config)
    device, parallel = torch.device("cpu"), ParallelContext()
    return load_model(arch, str(directory), LoadConfig(), dtype, device, parallel, None, 1024, 0)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(5, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def assert_close(logits: torch.Tensor, expected_logprobs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert logits.dtype == torch.float32 and logits.shape == expected_logprobs.shape
    difference = (logits.log_softmax(dim=-1) - expected_logprobs).abs().max().item()
    assert difference <= tolerance, difference


@pytest.mark.parametrize(("family", "fields"), CASES.values(), ids=CASES.keys())
def test_logprobs_equal_those_of_transformers(tmp_path: Path, family: str, fields: dict[str, Any]):
    """Whole prompts, the same prompts in chunks, then one token at a time beside each other."""
    reference = make_checkpoint(family, tmp_path, **fields)
    if "max_shard_size" in fields:
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    stepper = Stepper(load(tmp_path))
    prompts = [random_ids(NUM_TOKENS, seed=1), random_ids(33, seed=2), random_ids(1, seed=3)]
    expected = [reference_logprobs(reference, ids) for ids in prompts]
    whole = stepper.step([(stepper.add(ids), len(ids)) for ids in prompts])
    for logits, logprobs in zip(whole, expected, strict=True):
        assert_close(logits, logprobs)
    long, short, _ = (stepper.add(ids) for ids in prompts)
    parts = [stepper.step(work) for work in ([(long, 7), (short, 20)], [(long, 100), (short, 1)])]
    parts += [stepper.step([(short, 1), (long, 1)])[::-1] for _ in range(12)]
    assert_close(torch.cat([logits for logits, _ in parts]), expected[0][:119])
    assert_close(torch.cat([logits for _, logits in parts]), expected[1])


def test_dynamic_rope_generates_past_the_original_length_as_transformers_does(tmp_path: Path):
    fields = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}
    reference = make_checkpoint("llama", tmp_path, **fields)
    ids = random_ids(60)
    stepper = Stepper(load(tmp_path))
    sequence = stepper.add(ids)
    stepper.step([(sequence, 30)])
    cache = transformers.DynamicCache(config=reference.config)
    with torch.inference_mode():
        reference(torch.tensor([ids[:30]]), None, None, cache)  # by place: releases name this argument differently
        for token in ids[30:]:
            output = reference(torch.tensor([[token]]), None, None, cache)
            (ours,) = stepper.step([(sequence, 1)])
            assert_close(ours, output.logits[0].log_softmax(dim=-1))


def test_a_bfloat16_checkpoint_runs_in_float32_and_the_other_way_round(tmp_path: Path):
    reference = make_checkpoint("qwen3", tmp_path)
    ids = random_ids(20)
    stepper = Stepper(load(tmp_path, torch.bfloat16))
    (logits,) = stepper.step([(stepper.add(ids), 20)])
    assert_close(logits, reference_logprobs(reference, ids), tolerance=0.1)
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    stepper = Stepper(load(tmp_path / "bf16"))
    (logits,) = stepper.step([(stepper.add(ids), 20)])
    reference = reference.from_pretrained(tmp_path / "bf16", dtype=torch.float32, attn_implementation="eager")
    assert_close(logits, reference_logprobs(reference, ids))


def test_a_step_without_tokens_gives_no_rows(tmp_path: Path):
    make_checkpoint("qwen3", tmp_path)
    stepper = Stepper(load(tmp_path))
    assert stepper.step([]) == []
    assert all(bool(cache.isnan().all()) for cache in stepper.kv_caches)
