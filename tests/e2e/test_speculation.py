"""Speculation as users switch it on: the bytes of plain decoding, in fewer steps where a text repeats itself."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.e2e.test_draft_tokens import KINDS, SETTINGS
from tests.models.stored_models import make_tiny

PROMPTS = [
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "Count: 1, 2, 3, 4, 5, 6, 7, 8,",
    "Once upon a time",
]
SPECULATIONS: dict[str, Any] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "suffix, else ngram": {"method": ["suffix", "ngram"], "prompt_lookup_max": 2},
    "suffix, else a model": {"method": ["suffix", "draft_model"], "model": "leaf", "num_speculative_tokens": 3},
    "itself as the draft model": {"method": "draft_model", "model": "leaf", "num_speculative_tokens": 3},
}


def answers(speculative_config: Any, model: str = "leaf") -> tuple[list[Any], int]:
    """What every kind of request gets for every prompt, and how many steps that took."""
    params = [SamplingParams(**{"max_tokens": 32, "seed": i, **kind}) for i, kind in enumerate(KINDS.values())]
    with LLM(model, **{**SETTINGS, "speculative_config": speculative_config}) as llm:
        asked = [(prompt, one) for prompt in PROMPTS for one in params] * 2  # what was answered is drafted from
        outputs = llm.generate([prompt for prompt, _ in asked], [one for _, one in asked], use_tqdm=False)
        num_steps = llm.llm_engine.last_stats.step
    found = [(one.text, tuple(one.token_ids), one.finish_reason, repr(one.logprobs)) for one in
             (output.outputs[0] for output in outputs)]  # fmt: skip
    return found, num_steps


@pytest.fixture(scope="module")
def plain() -> tuple[list[Any], int]:
    return answers("off")


@pytest.mark.parametrize("name", SPECULATIONS)
def test_drafts_change_no_byte_and_save_steps(name: str, plain: tuple[list[Any], int]):
    found, num_steps = answers({**SPECULATIONS[name], "enable_adaptive_verification": False})
    assert found == plain[0]
    assert num_steps < plain[1]


def test_the_controller_changes_no_byte(plain: tuple[list[Any], int]):
    assert answers(SPECULATIONS["suffix"])[0] == plain[0]


def test_an_engine_without_settings_drafts_and_changes_no_byte(plain: tuple[list[Any], int]):
    assert answers(None)[0] == plain[0]
    for given, is_drafting in ((None, True), ("off", False)):
        with LLM("leaf", **{**SETTINGS, "speculative_config": given}, disable_log_stats=False) as llm:
            llm.generate(PROMPTS, SamplingParams(max_tokens=8), use_tqdm=False)
            names = {metric.name for metric in llm.get_metrics()}
        assert ("vllm:spec_decode_num_drafts" in names) == is_drafting


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("gguf", tmp_path_factory.mktemp("gguf"))[0])


def test_drafts_change_no_byte_of_a_gguf_file(gguf: str):
    expected, num_steps = answers("off", gguf)
    for method in ({"method": "suffix"}, {"method": "draft_model", "model": gguf, "num_speculative_tokens": 3}):
        found, num_steps_with_drafts = answers({**method, "enable_adaptive_verification": False}, gguf)
        assert found == expected and num_steps_with_drafts < num_steps


def test_heads_for_a_gguf_file_are_refused_by_name(gguf: str):
    with pytest.raises(ConfigError, match="method eagle needs a target that Quire computes itself"):
        LLM(gguf, **{**SETTINGS, "speculative_config": {"method": "eagle", "model": "leaf"}})
