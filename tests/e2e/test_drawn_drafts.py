"""Models that draw their drafts: the distribution of answers is the target's, and greedy answers are its bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.speculative import SpeculativeConfig
from quire.core.memory_budget import drawn_drafts_bytes
from quire.sample import drawn_drafts
from quire.sample.drawn_drafts import DrawnDrafts
from quire.sample.rng import STREAM_ACCEPT
from quire.spec_decode.chained import ChainedProposer
from quire.worker.draft_acceptance import DraftAcceptance
from tests.effort import effort
from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.heads import make_eagle, make_eagle3, make_medusa
from tests.statistics.drafting_engine import WAYS, DraftingEngine

SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "num_threads": 1, "max_num_seqs": 8, "block_size": 16, "num_gpu_blocks_override": 64,
    "dtype": "float32",
}  # fmt: skip
PROMPTS = [np.random.default_rng(seed).integers(5, VOCAB_SIZE, 5 + 9 * seed).tolist() for seed in range(4)]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1, seed=i, **kind)
    for i, kind in enumerate((
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.05},
    ))
]  # fmt: skip
HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle": make_eagle,
    "eagle3": lambda path: make_eagle3(path, aux_layers=(1, 2, 3)),
    "medusa": make_medusa,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DraftingEngine:
    return DraftingEngine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    make_checkpoint("llama", directory, num_hidden_layers=4, rms_norm_eps=1e-6)
    return directory


@pytest.mark.parametrize("name", [name for name in WAYS if "penalties" in name])
def test_an_engine_with_a_draft_model_has_the_exact_distribution(name: str, engine: DraftingEngine) -> None:
    p, share = engine.try_out(**WAYS[name], count=effort(600, 20_000))
    assert p > 0.005
    assert 0.2 < share < 0.95


def test_an_engine_whose_drafts_are_drawn_with_the_numbers_that_judge_them_has_not(
    engine: DraftingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn_drafts, "STREAM_DRAFT", STREAM_ACCEPT)
    assert engine.try_out({"acceptance": "rejection"}, "plain", 1500)[0] < 1e-6


def test_what_a_model_draws_for_itself_stands(engine: DraftingEngine) -> None:
    assert engine.try_out({"acceptance": "rejection"}, "plain", 200, by_itself=True)[1] > 0.995


def answers(target: Path, monkeypatch: pytest.MonkeyPatch, **speculative_config: Any) -> tuple[list[Any], int]:
    """What every prompt gets, and how many distributions of drafts were looked at."""
    looked_at = []
    of_lines = DrawnDrafts.of_lines

    def noting(self: DrawnDrafts, *args: Any) -> Any:
        found = of_lines(self, *args)
        np.testing.assert_allclose(found.probs.sum(1), 1.0, rtol=1e-4)
        looked_at.append(len(found.drawn))
        return found

    monkeypatch.setattr(DrawnDrafts, "of_lines", noting)
    config = {"num_speculative_tokens": 3, "enable_adaptive_verification": False, **speculative_config}
    with LLM(str(target), speculative_config=config if speculative_config else None, **SETTINGS) as llm:
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], PARAMS, use_tqdm=False)
    monkeypatch.undo()
    found = [(tuple(one.token_ids), repr(one.logprobs)) for one in (output.outputs[0] for output in outputs)]
    return found, sum(looked_at)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_of_heads_are_judged_by_what_they_were_drawn_from(
    head: str, method: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = answers(target, monkeypatch)
    keys = {"method": head, "model": str(HEADS[head](tmp_path)), "acceptance": "rejection"}
    found, num_looked_at = answers(target, monkeypatch, **keys, rejection_sample_method=method)
    assert found[0] == plain[0], "greedy"
    assert num_looked_at > 40
    assert found == answers(target, monkeypatch, **keys, rejection_sample_method=method)[0]


def test_a_chain_says_which_drafts_are_of_the_model(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model, verify, propose = [], DraftAcceptance.verify, ChainedProposer.propose

    def noting(self: DraftAcceptance, batch: Any, *args: Any) -> Any:
        if batch.is_own_draft is not None:
            of_model.append(batch.is_own_draft & (np.diff(batch.logits_start_loc) > 1))
        return verify(self, batch, *args)

    sources: list[Any] = []

    def proposing(self: ChainedProposer, rows: Any) -> Any:
        found = propose(self, rows)
        sources.append(found.sources[found.counts > 0])
        return found

    monkeypatch.setattr(DraftAcceptance, "verify", noting)
    monkeypatch.setattr(ChainedProposer, "propose", proposing)
    config = {
        "method": ["ngram", "draft_model"],
        "model": str(target),
        "prompt_lookup_max": 1,
        "acceptance": "rejection",
    }
    answers(target, monkeypatch, **config)
    num_of_model = sum(int(one.sum()) for one in of_model)
    assert num_of_model == sum(int((one == 1).sum()) for one in sources) > 5
    assert any((one == 0).any() for one in sources)


def test_the_distributions_take_what_is_planned() -> None:
    config = SpeculativeConfig(method=("draft_model",), model="m", acceptance="rejection", num_speculative_tokens=3)
    assert config.draws_drafts and not SpeculativeConfig(method=("ngram",), acceptance="rejection").draws_drafts
    assert drawn_drafts_bytes(8, config.num_tokens, 1000) == 8 * 3 * 1000 * 4
