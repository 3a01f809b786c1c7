"""Models that draft on several ranks and stages: drafts are those of one rank, and answers are its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.config.families.deepseek import DeepseekV3
from tests.e2e import test_draft_trees
from tests.e2e.test_model_drafts import GREEDY, PROMPTS, with_model
from tests.effort import effort
from tests.models.checkpoints import make_checkpoint
from tests.models.drafting import run
from tests.models.heads import make_eagle, make_eagle3, make_medusa
from tests.models.latents import LATENTS
from tests.models.shipped_heads import ShippedHead
from tests.parallel.ranks import ranks_as_threads

METHODS = ("draft_model", "eagle", "eagle3", "medusa")
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    make_checkpoint("llama", directory, num_hidden_layers=4, rms_norm_eps=1e-6)
    return directory


def make_drafter(method: str, path: Path) -> Path:
    if method == "eagle":
        return make_eagle(path)
    if method == "eagle3":
        return make_eagle3(path, aux_layers=(1, 2, 3))
    if method == "medusa":
        return make_medusa(path)
    make_checkpoint("qwen3", path, seed=5, num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    return path


def check(model: Path, num_ranks: int, num_stages: int = 1, **settings: Any) -> None:
    params = [GREEDY, DRAWN, GREEDY, DRAWN]
    expected = run(model, PROMPTS, params, pytest.MonkeyPatch(), rounds=2, **settings)
    with ranks_as_threads():
        more = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages, "rounds": 2}
        found = run(model, PROMPTS, params, pytest.MonkeyPatch(), **more, **settings)
    assert found.answers == expected.answers and sum(len(one.drafts) for one in found.drafted) > 100
    if num_stages == 1:
        assert found.drafted == expected.drafted and found.num_steps == expected.num_steps
    elif not {"max_num_batched_tokens", "num_gpu_blocks_override"} & settings.keys():
        # Steps are of other rows, which draft what they draft in any. Chunks, of which heads take the last, differ.
        by_tokens = {one.tokens: one for one in expected.drafted}
        assert all(by_tokens.get(one.tokens, one) == one for one in found.drafted)


@pytest.mark.parametrize(
    ("method", "num_ranks", "num_stages", "settings"),
    effort(
        (("draft_model", 2, 1, {}), ("eagle3", 1, 2, {"max_num_batched_tokens": 16})),
        [
            (method, *sizes, more)
            for method in METHODS
            for sizes in ((2, 1), (1, 2), (2, 2), (1, 4))
            for more in ({}, {"enforce_eager": True}, {"num_gpu_blocks_override": 14})
        ],
    ),
)
def test_drafts_are_those_of_one_rank(
    tmp_path: Path, target: Path, method: str, num_ranks: int, num_stages: int, settings: dict[str, Any]
):
    check(target, num_ranks, num_stages, **with_model(method, make_drafter(method, tmp_path)), **settings)


@pytest.mark.parametrize(("num_ranks", "num_stages"), effort(((2, 1),), ((4, 1), (1, 2), (2, 2))))
def test_heads_that_ship_with_a_mixture_draft_what_they_draft_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_stages: int
):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    fields = {**LATENTS["DeepseekV3"], "num_hidden_layers": 3, "rope_parameters": rope}
    monkeypatch.setattr(DeepseekV3, "ignored_tensors", (r"^model\.layers\.2\.",))
    ShippedHead("DeepseekV3", tmp_path, fields)
    check(tmp_path, num_ranks, num_stages, **with_model("mtp", None))


@pytest.mark.parametrize(
    ("method", "num_ranks", "num_stages"),
    effort(
        (("medusa", 1, 2), ("eagle", 2, 1)),
        [(method, *sizes) for method in ("medusa", "eagle") for sizes in ((2, 1), (1, 2), (2, 2))],
    ),
)
def test_trees_of_drafts_are_verified_by_all_ranks(tmp_path: Path, method: str, num_ranks: int, num_stages: int):
    make_checkpoint("llama", tmp_path / "target", vocab_size=test_draft_trees.SMALL, rms_norm_eps=1e-6)
    make = make_medusa if method == "medusa" else make_eagle
    heads = make(tmp_path / "heads", vocab_size=test_draft_trees.SMALL)
    plain = test_draft_trees.answers(tmp_path / "target", None)
    steps = test_draft_trees.Steps(pytest.MonkeyPatch())
    with ranks_as_threads():
        sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
        assert test_draft_trees.answers(tmp_path / "target", heads, method=method, **sizes) == plain
    assert steps.num_trees > 20 and steps.num_accepted > 20
