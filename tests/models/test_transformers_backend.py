"""Which classes of transformers are refused, who chooses them, and what makes their bits the same in any batch.

Their tokens are compared by the suite of the families (`tests.models.families.through_transformers`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ModelError, QuireError, UnsupportedError
from quire.models.transformers_backend.classes import find_class
from quire.models.transformers_backend.even_rows import EvenRows
from quire.models.transformers_backend.probe import run_probe
from quire.models.transformers_backend.self_check import compare_batches
from tests.models.transformers_cases import REFUSED, SIZES, architecture_of, config_of, write_config

SETTINGS = {"dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True, "model_impl": "transformers"}
HELIUM = config_of("helium", {**SIZES, "head_dim": 16})


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_class_that_cannot_be_served_is_refused_by_name_and_reason(model_type: str):
    fields, reason = REFUSED[model_type]
    with pytest.raises(UnsupportedError, match=reason) as caught:
        run_probe(find_class(architecture_of(model_type), config_of(model_type, fields)), torch.float32)
    assert architecture_of(model_type) in caught.value.message


def test_a_rotation_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    raw = {**HELIUM, "rope_parameters": rope}
    with pytest.raises(UnsupportedError, match="longest sequence of a batch"):
        find_class("HeliumForCausalLM", raw)


def test_refusals_come_before_weights_are_looked_for(tmp_path: Path):
    write_config(tmp_path, config_of("diffllama", SIZES))
    with pytest.raises(UnsupportedError, match="DiffLlamaForCausalLM of transformers"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vision_config": {}}, UnsupportedError, "it takes more than text"),
        ({"is_encoder_decoder": True}, UnsupportedError, "encoder with a decoder"),
        ({"quantization_config": {"quant_method": "quark"}}, ModelError, "quark"),
        ({"num_attention_heads": 0}, ModelError, "num_attention_heads"),
    ],
)
def test_what_config_json_shows_is_refused_without_loading_transformers(tmp_path: Path, fields, error, message):
    write_config(tmp_path, {**HELIUM, **fields})
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), **SETTINGS)


def test_without_the_extra_an_unknown_architecture_names_it(tmp_path: Path, monkeypatch):
    write_config(tmp_path, HELIUM)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model_impl, words in (("auto", "HeliumForCausalLM"), ("transformers", "not installed")):
        with pytest.raises(QuireError, match=words) as caught:
            LLM(str(tmp_path), **{**SETTINGS, "model_impl": model_impl})
        assert "quire[transformers]" in (caught.value.hint or "")


def test_auto_takes_transformers_where_quire_has_no_family_and_the_front_end_does_not_load_it(tmp_path: Path):
    write_config(tmp_path, HELIUM)
    code = (
        "import sys; from quire.config.build import build_config; from quire.engine.config_lookup import look_up\n"
        f"config, _, _ = look_up(build_config(model={str(tmp_path)!r}))\n"
        "print(config.model.model_impl, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["transformers", "False", "False"]


def test_the_setting_chooses(tmp_path: Path):
    write_config(tmp_path, HELIUM)
    with pytest.raises(ModelError, match="HeliumForCausalLM"):
        LLM(str(tmp_path), **{**SETTINGS, "model_impl": "quire"})
    params, answers = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), []
    for model_impl in ("vllm", "transformers"):
        with LLM("leaf", **{**SETTINGS, "model_impl": model_impl}) as llm:
            assert llm.llm_engine.config.model.model_impl == {"vllm": "quire"}.get(model_impl, model_impl)
            [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


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
