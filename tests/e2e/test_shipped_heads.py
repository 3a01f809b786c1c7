"""What ships with `leaf` to draft for it: found without a path, and as good as its cards say on held-out prompts."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.shipped_drafters import FOLDERS
from quire.models.hub import resolve_model_path
from training.corpus.registry import held_out_samples
from training.tokenizer import prompt_text

METHODS = ("draft_model", "eagle", "medusa")
LEAF = resolve_model_path("leaf", None, None)
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "num_threads": 1}
PARAMS = SamplingParams(temperature=0, max_tokens=100)


def card(method: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LEAF / FOLDERS[method] / "card.json").read_text())
    return found


def answers(**settings: Any) -> list[RequestOutput]:
    prompts = [prompt_text(sample) for sample in held_out_samples("tales", 10)]
    with LLM("leaf", **{**SETTINGS, **settings}) as llm:
        return llm.generate(prompts, PARAMS, use_tqdm=False)


@cache
def plain() -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in answers()]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_of_the_embedded_model_accepts_what_its_card_says_and_changes_no_token(method: str) -> None:
    found = answers(speculative_config={"method": method, "enable_adaptive_verification": False})
    assert [list(one.outputs[0].token_ids) for one in found] == plain()
    stats = [one.outputs[0].spec_decode_metrics for one in found]
    accepted = sum(one.num_accepted for one in stats if one is not None)
    steps = sum(one.num_steps for one in stats if one is not None)
    # The card counts answers to questions about stories, too.
    assert 1 + accepted / steps > 0.8 * card(method)["acceptance"]["greedy"]["stories"]["tokens_per_step"]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_of_the_embedded_model_is_the_one_of_its_card_and_made_for_this_model(method: str) -> None:
    for name, directory in (("digest", LEAF / FOLDERS[method]), ("target_digest", LEAF)):
        assert card(method)[name] == hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{card(method)['digest']}`" in (LEAF / "README.md").read_text()


def test_all_heads_together_are_small() -> None:
    files = [file for method in METHODS for file in (LEAF / FOLDERS[method]).iterdir()]
    assert sum(Path(file).stat().st_size for file in files) <= 8_000_000


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_the_same_captured_and_call_by_call(method: str) -> None:
    found = []
    for enforce_eager in (False, True):
        drafting = {"method": method, "num_speculative_tokens": 4, "enable_adaptive_verification": False}
        one = answers(speculative_config=drafting, enforce_eager=enforce_eager, max_num_seqs=3)
        found.append([(list(each.outputs[0].token_ids), each.outputs[0].spec_decode_metrics) for each in one])
    assert found[0] == found[1]
