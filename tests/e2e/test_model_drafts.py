"""Draft models and heads: answers are the bytes of plain decoding, and drafts are those of slow references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from quire import SamplingParams
from quire.config.families.deepseek import DeepseekV3
from quire.errors import ConfigError
from quire.models.heads.feature_head import FusedHead
from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.drafting import Run, run
from tests.models.heads import Reference, make_eagle, make_eagle3, make_medusa
from tests.models.hybrids import HYBRIDS
from tests.models.latents import LATENTS
from tests.models.shipped_heads import ShippedHead

PROMPTS = [
    np.random.default_rng(seed).integers(5, VOCAB_SIZE, size).tolist() for seed, size in enumerate((3, 17, 40, 70))
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
AUX_LAYERS = (1, 2, 3)
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def sampled(temperature: float) -> list[SamplingParams]:
    """Seeded requests."""
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True, logprobs=1)
        for seed in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("target")
    return directory, make_checkpoint("llama", directory, num_hidden_layers=4, rms_norm_eps=1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary, with heads of another shape."""
    directory = tmp_path_factory.mktemp("small")
    make_checkpoint("qwen3", directory, seed=5, num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    return directory


def with_model(method: str, model: Path | None, num_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    """Settings of an engine that drafts whenever it may."""
    return {
        "speculative_config": {
            "method": method, "model": None if model is None else str(model), "num_speculative_tokens": num_tokens,
            "enable_adaptive_verification": False, **fields,
        }
    }  # fmt: skip


def test_a_model_that_drafts_for_itself_is_always_right(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = target
    plain = run(directory, PROMPTS, GREEDY, monkeypatch)
    drafting = run(directory, PROMPTS, GREEDY, monkeypatch, **with_model("draft_model", directory))
    assert drafting.answers == plain.answers
    right, total = drafting.shares()
    assert right == total > 60
    assert drafting.num_steps < plain.num_steps / 2


def test_its_likeliest_tokens_stand_as_often_as_they_are_drawn(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = target
    plain = run(directory, PROMPTS, sampled(0.7), monkeypatch)
    drafting = run(directory, PROMPTS, sampled(0.7), monkeypatch, **with_model("draft_model", directory, 1))
    assert drafting.answers == plain.answers
    right, total = drafting.shares()
    expected = sum(drafted.scores[0] for drafted in drafting.drafted if drafted.drafts)
    assert abs(right - expected) < 4 * (total**0.5)


def test_a_draft_model_of_another_shape_changes_no_byte(
    target: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = target
    for params in (GREEDY, sampled(1.0)):
        plain = run(directory, PROMPTS, params, monkeypatch)
        drafting = run(directory, PROMPTS, params, monkeypatch, **with_model("draft_model", small))
        assert drafting.answers == plain.answers
        assert sum(len(one.drafts) for one in drafting.drafted) > 100


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 16}, {"num_gpu_blocks_override": 14}], ids=["chunks", "few"]
)
def test_drafts_are_the_same_whatever_was_computed_when(
    settings: dict[str, Any], target: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = target
    expected = run(directory, PROMPTS, GREEDY, monkeypatch, **with_model("draft_model", small))
    found = run(directory, PROMPTS, GREEDY, monkeypatch, rounds=2, **with_model("draft_model", small), **settings)
    assert found.answers == expected.answers
    known = {one.tokens: one.drafts for one in expected.drafted}
    pairs = [(known[one.tokens], one.drafts) for one in found.drafted if one.tokens in known]
    assert len(pairs) > 10
    assert all(a[: len(b)] == b[: len(a)] for a, b in pairs)


def test_a_draft_model_with_other_words_is_refused(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path, vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ConfigError, match="vocabulary of 319 tokens, the target one of 320"):
        run(target[0], PROMPTS, GREEDY, monkeypatch, **with_model("draft_model", tmp_path))


def test_drafts_stop_where_the_draft_model_ends(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path, max_position_embeddings=48)
    drafting = run(target[0], PROMPTS, GREEDY, monkeypatch, **with_model("draft_model", tmp_path))
    assert max(len(one.tokens) + len(one.drafts) for one in drafting.drafted if one.drafts) == 49
    assert drafting.answers == run(target[0], PROMPTS, GREEDY, monkeypatch).answers


Make = Callable[[Path], Path]
Drafts = Callable[[Reference, tuple[int, ...], int], tuple[list[int], list[float]]]
HEADS: dict[str, tuple[str, Make, Drafts]] = {
    "medusa": ("medusa", make_medusa, lambda ref, tokens, n: ref.medusa(tokens, n, 1)),
    "medusa, two blocks, the target's projection": (
        "medusa",
        lambda path: make_medusa(path, num_blocks=2, shares_projection=True),
        lambda ref, tokens, n: ref.medusa(tokens, n, 2),
    ),
    "eagle": ("eagle", make_eagle, lambda ref, tokens, n: ref.eagle(tokens, [0] * n)),
    "eagle3": (
        "eagle3",
        lambda path: make_eagle3(path, aux_layers=AUX_LAYERS),
        lambda ref, tokens, n: ref.eagle3(tokens, [0] * n, AUX_LAYERS),
    ),
}


@pytest.mark.parametrize("head", list(HEADS))
def test_heads_draft_what_the_papers_say_and_change_no_byte(
    head: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = target
    method, make, drafts_of = HEADS[head]
    reference = Reference.of(model, make(tmp_path))
    plain = run(directory, PROMPTS, GREEDY, monkeypatch)
    drafting = run(directory, PROMPTS, GREEDY, monkeypatch, **with_model(method, tmp_path))
    assert drafting.answers == plain.answers
    check_drafts(drafting, lambda tokens, n: drafts_of(reference, tokens, n))


def check_drafts(drafting: Run, drafts_of: Callable[[tuple[int, ...], int], tuple[list[int], list[float]]]) -> None:
    """Compare some of the drafts with the reference's: ids up to near ties, scores closely."""
    longest = max(len(one.drafts) for one in drafting.drafted)
    assert longest == 3
    chosen = [one for one in drafting.drafted if one.drafts][::5]
    assert len(chosen) > 8
    num_equal = 0
    for one in chosen:
        drafts, scores = drafts_of(one.tokens, len(one.drafts))
        np.testing.assert_allclose(one.scores[0], scores[0], rtol=2e-3)
        num_equal += tuple(drafts) == one.drafts
    assert num_equal >= len(chosen) - 1


def test_the_layer_behind_the_last_of_deepseek_v3_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        **LATENTS["DeepseekV3"],
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    head = ShippedHead("DeepseekV3", tmp_path, fields)
    monkeypatch.setattr(DeepseekV3, "ignored_tensors", (r"^model\.layers\.2\.",))
    plain = run(tmp_path, PROMPTS, GREEDY, pytest.MonkeyPatch())
    drafting = run(tmp_path, PROMPTS, GREEDY, pytest.MonkeyPatch(), **with_model("mtp", None))
    assert drafting.answers == plain.answers
    check_drafts(drafting, head.drafts)


def test_the_head_that_ships_with_qwen3_next_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        **HYBRIDS["Qwen3Next"],
        "num_hidden_layers": 5,
        "layer_types": [*LAYER_TYPES, "full_attention"],
        "mlp_only_layers": [],
    }
    head = ShippedHead("Qwen3Next", tmp_path, fields, offset=1.0)
    drafting = run(
        tmp_path, PROMPTS, GREEDY, monkeypatch, verifies=False, enable_prefix_caching=False, **with_model("mtp", None)
    )
    check_drafts(drafting, head.drafts)


def test_small_passes_of_a_head_are_captured(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [], FusedHead.forward

    def noting(head: FusedHead, token_ids: Any, *args: Any) -> Any:
        calls.append(len(token_ids))
        return forward(head, token_ids, *args)

    def drafts(**settings: Any) -> list[tuple[int, ...]]:
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FusedHead, "forward", noting)
            found = run(target[0], PROMPTS, GREEDY, patch, **with_model("eagle", head), **settings)
        return [one.drafts for one in found.drafted]

    head = make_eagle(tmp_path)
    captured, num_captured = drafts(), len(calls)
    eager, num_eager = drafts(enforce_eager=True), len(calls)
    assert captured == eager
    assert num_captured < num_eager / 2
