"""Models with selective state spaces in the engine: transformers' results in float32, and the same bits however run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.families.registry import parse_config
from quire.errors import ModelError
from quire.metrics.records import Counter
from quire.models.model_dir import read_model_dir
from tests.effort import effort
from tests.models.state_spaces import STATE_SPACES, make_state_space
from tests.models.test_families import TOLERANCE, random_ids, reference_logprobs

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
PROMPTS = [random_ids(count, seed=count) for count in (1, 7, 40, 90, 64, 65)]
HYBRIDS = [case for case in STATE_SPACES if "mamba" not in case]
Answers = list[tuple[list[int], list[float]]]


def answers(llm: LLM, prompts: list[list[int]]) -> Answers:
    """Tokens and their log-probabilities, for each prompt."""
    found = []
    for request in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS):
        (output,) = request.outputs
        assert output.logprobs is not None
        tokens = list(output.token_ids)
        found.append((tokens, [row[token].logprob for token, row in zip(tokens, output.logprobs, strict=True)]))
    return found


def engine(directory: Path, **settings: Any) -> LLM:
    return LLM(
        str(directory), **{"dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 16, **settings}
    )


@pytest.mark.parametrize("case", STATE_SPACES)
def test_answers_are_those_of_transformers_and_the_same_bits_however_they_are_computed(tmp_path: Path, case: str):
    reference = make_state_space(case, tmp_path)
    plain = engine(tmp_path, max_num_seqs=6, enable_prefix_caching=False)
    expected = answers(plain, PROMPTS)
    of_torch = answers(engine(tmp_path, attention_backend="torch_reference"), PROMPTS[:4])
    for i, (prompt, (tokens, logprobs)) in enumerate(zip(PROMPTS, expected, strict=True)):
        rows = reference_logprobs(reference, prompt + tokens)[len(prompt) - 1 : -1]
        theirs = rows[torch.arange(len(tokens)), tokens]
        assert bool((rows.max(dim=-1).values - theirs <= TOLERANCE).all()), "other tokens"
        assert bool(((torch.tensor(logprobs) - theirs).abs() <= TOLERANCE).all())
        if i < len(of_torch):
            assert of_torch[i][0] == tokens
            assert bool(((torch.tensor(of_torch[i][1]) - theirs).abs() <= TOLERANCE).all())
    assert [answers(plain, [prompt])[0] for prompt in PROMPTS] == expected, "alone"
    for chunk in effort((7,), (1, 7, 64)):
        chunked = engine(tmp_path, max_num_seqs=min(chunk, 4), max_num_batched_tokens=chunk)
        assert answers(chunked, PROMPTS) == expected, f"chunks of at most {chunk} tokens"


@pytest.mark.parametrize("case", STATE_SPACES)
def test_a_prefix_is_found_and_changes_no_bits(tmp_path: Path, case: str):
    make_state_space(case, tmp_path)
    prefix = random_ids(70, seed=9)
    prompts = [[*prefix, 5], [*prefix, 6, 7], [*prefix, 5]]
    cold = answers(engine(tmp_path, enable_prefix_caching=False), prompts)
    llm = engine(tmp_path)
    for prompt, expected in zip(prompts, cold, strict=True):
        assert answers(llm, [prompt]) == [expected]
    (request,) = llm.generate([{"prompt_token_ids": [*prefix, 8]}], PARAMS)
    assert request.num_cached_tokens == 64


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("case", HYBRIDS)
def test_preempted_requests_give_the_same_bits(tmp_path: Path, case: str, mode: str):
    make_state_space(case, tmp_path)
    prompts = [random_ids(30, seed=seed) for seed in range(5)]
    expected = answers(engine(tmp_path, enable_prefix_caching=False), prompts)
    settings = {"preemption_mode": mode, "swap_space": 0.01 if mode == "swap" else 0.0}
    scarce = engine(tmp_path, num_gpu_blocks_override=9, disable_log_stats=False, **settings)
    assert answers(scarce, prompts) == expected
    counts = {metric.labels["mode"]: metric for metric in scarce.get_metrics() if metric.name == "quire:preemptions"}
    counted = counts[mode]
    assert isinstance(counted, Counter) and counted.value > 0


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("case", ["falcon mamba", "falcon h1", "nemotron h"])
def test_decode_steps_are_recorded_and_tokens_do_not_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, quantization: str | None
):
    make_state_space(case, tmp_path)
    with caplog.at_level(logging.WARNING):
        llm = engine(tmp_path, dtype="bfloat16", quantization=quantization, enable_prefix_caching=False)
        together = answers(llm, PROMPTS)
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == together
    assert "not captured" not in caplog.text


def test_a_named_number_of_channels_counts_more_than_the_expansion(tmp_path: Path):
    reference = make_state_space("falcon mamba", tmp_path, expand=16, intermediate_size=96)
    (mamba,) = {layer.mamba for layer in parse_config(read_model_dir(tmp_path).config).layers}
    assert mamba is not None and mamba.inner_size == 96
    ((tokens, _),) = answers(engine(tmp_path), PROMPTS[1:2])
    rows = reference_logprobs(reference, PROMPTS[1] + tokens)[len(PROMPTS[1]) - 1 : -1]
    assert rows.argmax(dim=-1).tolist() == tokens


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state that is too large": ("mamba", {"state_size": 1000}, "state_size"),
    "a convolution of one token": ("mamba", {"conv_kernel": 1}, "conv_kernel"),
    "heads that do not divide": ("mamba2", {"num_heads": 7}, "num_heads"),
    "heads of another size": ("mamba2", {"head_dim": 17}, "head_dim"),
    "groups that do not divide": ("mamba2", {"n_groups": 3}, "n_groups"),
    "time steps in the wrong order": ("mamba2", {"time_step_limit": [1.0, 0.0]}, "time_step_limit"),
    "another activation": ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
    "too few multipliers": ("falcon h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
    "a multiplier that is no number": ("falcon h1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers"),
    "biases under a multiplier": ("falcon h1", {"attention_bias": True}, "attention_bias"),
    "an unknown layer": ("granite hybrid", {"layer_types": ["mamba", "mamba", "window"]}, "layer_types"),
    "too few layers": ("granite hybrid", {"layer_types": ["mamba"]}, "layer_types"),
    "a letter that says nothing": (
        "nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "M?"}, "hybrid_override_pattern",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "fields", "name"), WRONG.values(), ids=WRONG.keys())
def test_impossible_models_are_refused_by_the_field(tmp_path: Path, case: str, fields: dict[str, Any], name: str):
    make_state_space(case, tmp_path)
    with pytest.raises(ModelError, match=name) as caught:
        parse_config({**read_model_dir(tmp_path).config, **fields})
    assert caught.value.hint
