"""Classes of transformers on Quire's engine: the tokens of transformers, the same bits in any batch, and refusals.

Tokens are compared by teacher forcing, as in `tests.e2e.test_parity_with_transformers`.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import ModelError, QuireError, UnsupportedError
from quire.models.transformers_backend.classes import find_class
from quire.models.transformers_backend.even_rows import EvenRows
from quire.models.transformers_backend.probe import run_probe
from quire.models.transformers_backend.self_check import compare_batches
from tests.models.checkpoints import make_tokenizer
from tests.models.transformers_cases import REFUSED, SERVED, architecture_of, config_of, make_checkpoint, write_config

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 40, 64, 65, 100, 128, 200, 299, 300)
MAX_TOKENS = 48
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
SETTINGS = {
    "dtype": "float32", "max_model_len": 400, "block_size": 16, "num_threads": 1, "skip_tokenizer_init": True,
    "model_impl": "transformers",
}  # fmt: skip


def prompts() -> list[dict[str, list[int]]]:
    """16 prompts; the first 40 tokens of the longer ones are the same."""
    rng = random.Random(0)
    common = [rng.randrange(3, 320) for _ in range(40)]
    own = [[rng.randrange(3, 320) for _ in range(length)] for length in LENGTHS]
    return [{"prompt_token_ids": (common + ids)[: len(ids)] if len(ids) > 40 else ids} for ids in own]


def results(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, bit for bit."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        lines = completion.logprobs or []
        found.append((completion.token_ids, [line[token].logprob for line, token in zip(lines, completion.token_ids)]))
    return found


@torch.inference_mode()
def check(model: torch.nn.Module, output: RequestOutput) -> None:
    """Every token is the argmax of transformers' scores, and its log-probability agrees."""
    [(tokens, logprobs)] = results([output])
    assert len(tokens) == MAX_TOKENS
    prompt = output.prompt_token_ids
    scores = torch.log_softmax(model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :], dim=-1)
    assert scores.argmax(-1).tolist() == tokens, f"prompt of {len(prompt)} tokens"
    difference = (scores.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(logprobs)).abs().max().item()
    assert difference <= TOLERANCE, f"prompt of {len(prompt)} tokens: {difference}"


@pytest.mark.parametrize("model_type", SERVED)
def test_a_class_gives_the_tokens_of_transformers_and_the_same_bits_in_any_batch(tmp_path: Path, model_type: str):
    reference = make_checkpoint(model_type, tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        together = llm.generate(prompts(), GREEDY, use_tqdm=False)
        cached = llm.generate(prompts(), GREEDY, use_tqdm=False)
    for output in together:
        check(reference, output)
    assert all(output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16 for output in cached)
    assert results(cached) == results(together)
    pool = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 37, "scheduler_reserve_full_isl": False}
    with LLM(str(tmp_path), **SETTINGS, **pool) as llm:
        pressed = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in pressed if output.metrics is not None) >= 2
    assert results(pressed) == results(together)


def test_structured_output_and_quantized_weights(tmp_path: Path):
    make_checkpoint("dots1", tmp_path)
    make_tokenizer(320).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs={"regex": "n = [0-9]{5}"})
    with LLM(str(tmp_path), **{**SETTINGS, "skip_tokenizer_init": False}, quantization="int8") as llm:
        answer = llm.generate(["A number:"], params, use_tqdm=False)[0].outputs[0]
    assert answer.finish_reason == "stop" and re.fullmatch("n = [0-9]{5}", answer.text)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_class_that_cannot_be_served_is_refused_by_name_and_reason(model_type: str):
    fields, reason = REFUSED[model_type]
    with pytest.raises(UnsupportedError, match=reason) as caught:
        run_probe(find_class(architecture_of(model_type), config_of(model_type, fields)), torch.float32)
    assert architecture_of(model_type) in caught.value.message


def test_a_rotation_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    raw = {**config_of("arcee", SERVED["arcee"]), "rope_parameters": rope}
    with pytest.raises(UnsupportedError, match="longest sequence of a batch"):
        find_class("ArceeForCausalLM", raw)


def test_refusals_come_before_weights_are_looked_for(tmp_path: Path):
    write_config(tmp_path, config_of("diffllama", SERVED["arcee"]))
    with pytest.raises(UnsupportedError, match="DiffLlamaForCausalLM of transformers"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vision_config": {}}, UnsupportedError, "it takes more than text"),
        ({"is_encoder_decoder": True}, UnsupportedError, "encoder with a decoder"),
        ({"quantization_config": {"quant_method": "fp8"}}, ModelError, "quantized"),
        ({"num_attention_heads": 0}, ModelError, "num_attention_heads"),
    ],
)
def test_what_config_json_shows_is_refused_without_loading_transformers(tmp_path: Path, fields, error, message):
    write_config(tmp_path, {**config_of("arcee", SERVED["arcee"]), **fields})
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), **SETTINGS)


def test_without_the_extra_an_unknown_architecture_names_it(tmp_path: Path, monkeypatch):
    write_config(tmp_path, config_of("arcee", SERVED["arcee"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model_impl, words in (("auto", "ArceeForCausalLM"), ("transformers", "not installed")):
        with pytest.raises(QuireError, match=words) as caught:
            LLM(str(tmp_path), **{**SETTINGS, "model_impl": model_impl})
        assert "quire[transformers]" in (caught.value.hint or "")


def test_auto_takes_transformers_where_quire_has_no_family_and_the_front_end_does_not_load_it(tmp_path: Path):
    write_config(tmp_path, config_of("arcee", SERVED["arcee"]))
    code = (
        "import sys; from quire.config.build import build_config; from quire.engine.config_lookup import look_up\n"
        f"config, _, _ = look_up(build_config(model={str(tmp_path)!r}))\n"
        "print(config.model.model_impl, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["transformers", "False", "False"]


def test_the_setting_chooses(tmp_path: Path):
    write_config(tmp_path, config_of("arcee", SERVED["arcee"]))
    with pytest.raises(ModelError, match="ArceeForCausalLM"):
        LLM(str(tmp_path), **{**SETTINGS, "model_impl": "quire"})
    prompt = {"prompt_token_ids": [5, 6, 7]}
    found = []
    for model_impl in ("vllm", "transformers"):
        with LLM("leaf", dtype="float32", model_impl=model_impl, num_threads=1, skip_tokenizer_init=True) as llm:
            assert llm.llm_engine.config.model.model_impl == {"vllm": "quire"}.get(model_impl, model_impl)
            found.append(results(llm.generate([prompt], GREEDY, use_tqdm=False))[0])
    assert found[0][0] == found[1][0]
    assert max(abs(a - b) for a, b in zip(found[0][1], found[1][1])) <= TOLERANCE


def test_a_class_whose_tokens_look_at_their_neighbours_is_found():
    def mixes(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = torch.stack([ids, positions], -1).float()
        return hidden + hidden.roll(1, 0)

    def counts(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids, torch.arange(len(ids))], -1).float()

    def rounds(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids, positions], -1).float() * (1 + 1e-6 * len(ids))

    assert [compare_batches(one) for one in (mixes, counts, rounds)] == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("func", [torch.nn.functional.silu, torch.sigmoid, torch.rsqrt, lambda x: torch.pow(x, -0.5)])
def test_padded_rows_have_the_same_bits_beside_others(func, dtype: torch.dtype):
    rows = torch.rand(33, 20, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.1
    with EvenRows():
        together = func(rows)
        assert all(torch.equal(func(rows[i : i + 1]), together[i : i + 1]) for i in range(33))
    assert torch.allclose(together.float(), func(rows).float(), rtol=1e-2)
