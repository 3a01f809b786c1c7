"""Medusa heads draft trees: answers are the bytes of plain decoding, and more drafts stand than of chains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.draft_trees import MOST_TREES
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.engine import core_factory
from quire.errors import ConfigError
from quire.worker.model_runner import ModelRunner
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import make_medusa

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"
SMALL = 8
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "num_threads": 1, "max_num_seqs": 12, "block_size": 16, "num_gpu_blocks_override": 90,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0, "min_tokens": 9},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0, "repetition_penalty": 1.3},
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of few tokens, so that random heads are right now and then; and the heads."""
    root = tmp_path_factory.mktemp("small")
    make_checkpoint("llama", root / "target", vocab_size=SMALL, rms_norm_eps=1e-6)
    return root / "target", make_medusa(root / "heads", vocab_size=SMALL)


class Steps:
    """What the worker was given, and how many drafts stood."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_trees = self.num_chains = self.num_accepted = 0
        execute_model, sample_tokens = ModelRunner.execute_model, ModelRunner.sample_tokens

        def noting(runner: ModelRunner, scheduled: SchedulerOutput) -> Any:
            if scheduled.drafts is not None:
                self.num_trees += scheduled.drafts.parents is not None
                self.num_chains += scheduled.drafts.parents is None
            return execute_model(runner, scheduled)

        def counting(runner: ModelRunner, *args: Any) -> ModelRunnerOutput:
            output = sample_tokens(runner, *args)
            self.num_accepted += len(output.sampled_token_ids) - len(output.rows)
            return output

        monkeypatch.setattr(ModelRunner, "sample_tokens", counting)
        monkeypatch.setattr(ModelRunner, "execute_model", noting)


def answers(
    target: Path, heads: Path | None, count: int = 6, tree: str | None = TREE, method: str = "medusa", **more: Any
) -> list[Any]:
    """Tokens and bits of log-probabilities of `count` requests."""
    settings = {**SETTINGS, **more}
    if heads is not None:
        drafting = {"method": method, "model": str(heads), "enable_adaptive_verification": False}
        settings["speculative_config"] = {**drafting, "speculative_token_tree": tree} if tree else drafting
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, seed=i, detokenize=False, **KINDS[i % len(KINDS)])
        for i in range(count)
    ]
    prompts = [np.random.default_rng(i).integers(3, SMALL, 3 + 9 * i).tolist() for i in range(count)]
    with LLM(str(target), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return [(tuple(one.outputs[0].token_ids), repr(one.outputs[0].logprobs)) for one in outputs]


def test_trees_change_no_byte_and_more_drafts_stand_than_of_chains(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    plain = answers(small[0], None)
    assert answers(small[0], small[1], tree=None) == plain
    of_chains, steps.num_accepted = steps.num_accepted, 0
    assert steps.num_trees == 0 < of_chains
    assert answers(small[0], small[1]) == plain
    assert steps.num_trees > 10
    assert steps.num_accepted > 1.5 * of_chains


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nor_with_the_prefix_cache_and_short_chunks(small: tuple[Path, Path], dtype: str) -> None:
    settings = {"dtype": dtype, "max_num_batched_tokens": 32, "attention_backend": "native_cpu"}
    assert answers(*small, **settings) == answers(small[0], None, **settings)


def test_an_engine_for_one_request_has_room_for_trees(small: tuple[Path, Path]) -> None:
    settings = {"max_num_seqs": 1, "num_gpu_blocks_override": None, "max_model_len": 64}
    assert answers(*small, count=2, **settings) == answers(small[0], None, count=2, **settings)


def test_many_rows_draft_chains(small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    steps, count = Steps(monkeypatch), MOST_TREES + 2
    assert answers(*small, count=count) == answers(small[0], None, count=count)
    assert steps.num_chains > 5


def test_rows_with_a_grammar_draft_chains_beside_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path / "target", rms_norm_eps=1e-6)
    heads, steps = make_medusa(tmp_path / "heads"), Steps(monkeypatch)
    kinds: list[dict[str, Any]] = [{"structured_outputs": {"regex": "[ab]{12}"}}, {}, {"temperature": 0}]
    params = [
        SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seed": 1, "logprobs": 0, **one}) for one in kinds
    ]
    drafting = {"method": "medusa", "model": str(heads), "enable_adaptive_verification": False}
    found = []
    for config in (None, {**drafting, "speculative_token_tree": TREE}):
        with LLM(str(tmp_path / "target"), speculative_config=config, **SETTINGS) as llm:
            outputs = llm.generate([{"prompt_token_ids": [5, 6, 7 + i]} for i in range(3)], params, use_tqdm=False)
        found.append([(one.outputs[0].text, repr(one.outputs[0].logprobs)) for one in outputs])
    assert found[0] == found[1]
    assert steps.num_trees > 3
    assert found[0][0][0].strip("ab") == "" and len(found[0][0][0]) == 12


def test_a_model_whose_layers_differ_takes_no_trees(small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = core_factory.plan_kv_cache

    def two_groups(*args: Any) -> Any:
        found = plan(*args)
        (group,) = found.groups
        return dataclasses.replace(
            found, groups=tuple(dataclasses.replace(group, layer_names=(n,)) for n in group.layer_names)
        )

    monkeypatch.setattr(core_factory, "plan_kv_cache", two_groups)
    with pytest.raises(ConfigError, match="speculative_token_tree needs a model whose layers"):
        answers(*small)
