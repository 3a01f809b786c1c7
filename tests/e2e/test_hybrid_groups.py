"""Models with sliding windows free the pages behind them, and answer with the same bits as when they keep them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.scheduler.scheduler import Scheduler
from quire.worker.model_runner import ModelRunner
from tests.e2e.same_bits import Answer, answers
from tests.e2e.test_parity_with_transformers import Reference, random_prompts
from tests.models.checkpoints import make_checkpoint

WINDOW = 24
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "every layer windowed": ("mistral", {"sliding_window": WINDOW}, 1),
    "two groups": ("qwen2", {**QWEN, "num_hidden_layers": 4, "max_window_layers": 2}, 2),
    "three groups": ("qwen2", {**QWEN, "num_hidden_layers": 3, "max_window_layers": 1}, 3),
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 704, "block_size": 16, "max_num_seqs": 16, "num_threads": 1,
    "max_num_batched_tokens": 64,
}  # fmt: skip
KEEPS_ALL = {"disable_hybrid_kv_cache_manager": True}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference, int]:
    family, overrides, num_groups = MODELS[request.param]
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(family, path, **overrides)
    return path, Reference(path), num_groups


def scheduler_of(llm: LLM) -> Scheduler:
    return core_of(llm)._scheduler


def core_of(llm: LLM) -> EngineCore:
    return llm.llm_engine._client._core  # type: ignore[attr-defined,no-any-return]


def runner_of(llm: LLM) -> ModelRunner:
    return core_of(llm)._executor._worker._runner  # type: ignore[attr-defined,no-any-return]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int = 16) -> list[Any]:
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        for i in range(len(prompts))
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def kept(model: tuple[Path, Reference, int]) -> list[Answer]:
    """The answers of an engine that keeps every page."""
    path, reference, _ = model
    with LLM(str(path), **SETTINGS, **KEEPS_ALL) as llm:
        assert len(runner_of(llm)._block_tables.tables) == 1
        return answers(run(llm, prompts_of(reference)))


def prompts_of(reference: Reference) -> list[list[int]]:
    """16 prompts of up to 260 tokens, of which most begin alike."""
    return [prompt[:260] for prompt in random_prompts(reference.model.config.vocab_size, seed=6, shared=100)[1::2]]


@pytest.mark.parametrize("backend", ["native_cpu", "torch_reference"])
def test_answers_equal_transformers(model, backend):
    path, reference, num_groups = model
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(reference)[::2]]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)
    with LLM(str(path), **SETTINGS, attention_backend=backend) as llm:
        assert len(runner_of(llm)._block_tables.tables) == num_groups
        for output in llm.generate(prompts, params, use_tqdm=False):
            reference.check(output)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 13, "max_num_seqs": 7},
        {"max_num_batched_tokens": 2048, "enforce_eager": True},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 50, "scheduler_reserve_full_isl": False},
    ],
    ids=str,
)
def test_answers_are_the_same_bits_as_with_every_page_kept(model, kept, settings):
    path, reference, num_groups = model
    if "num_gpu_blocks_override" in settings and num_groups == 1:
        settings = {**settings, "num_gpu_blocks_override": 12}
    with LLM(str(path), **{**SETTINGS, **settings}) as llm:
        outputs = run(llm, prompts_of(reference))
        assert answers(outputs) == kept
        if "num_gpu_blocks_override" in settings:
            assert sum(output.metrics.num_preemptions for output in outputs) >= 5
        assert scheduler_of(llm)._kv.usage == 0.0
        again = run(llm, prompts_of(reference))
        assert answers(again) == kept
        if not settings:
            assert all(output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16 for output in again)


def test_pages_that_left_the_window_are_never_read_nor_is_the_null_page(model, kept, monkeypatch):
    path, reference, _ = model
    with LLM(str(path), **SETTINGS) as llm:
        pool, runner = scheduler_of(llm)._kv._pool, runner_of(llm)
        execute = ModelRunner.execute_model

        def poison_free_pages(runner: ModelRunner, scheduled: Any) -> None:
            free = torch.from_numpy(pool.ref_counts() == 0)
            if not pool.num_cached_blocks:
                for cache in runner._attention._kv_caches:
                    cache[free] = float("nan")
            execute(runner, scheduled)

        monkeypatch.setattr(ModelRunner, "execute_model", poison_free_pages)
        scheduler_of(llm)._kv._is_caching = False
        assert answers(run(llm, prompts_of(reference))) == kept
        assert all(cache[0].isnan().all() for cache in runner._attention._kv_caches)


def usages(llm: LLM, prompts: list[list[int]], max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages in use at the start of each step."""
    pool, seen = scheduler_of(llm)._kv._pool, []
    execute = ModelRunner.execute_model

    def count(runner: ModelRunner, scheduled: Any) -> None:
        seen.append(pool.num_usable_blocks - pool.num_free_blocks)
        execute(runner, scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute_model", count)
        run(llm, prompts, max_tokens)
    return seen


def test_a_windowed_model_holds_no_more_pages_than_window_and_chunk_take_however_long_it_runs(tmp_path, monkeypatch):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    prompt = [random.Random(1).randrange(200) for _ in range(600)]
    most = -(-(WINDOW - 1 + 64 - 1) // 16) + 1
    decoding = -(-(WINDOW - 1) // 16) + 1
    with LLM(str(tmp_path), **SETTINGS) as llm:
        pages = usages(llm, [prompt], 100, monkeypatch)
        assert max(pages) <= most and max(pages[-90:]) <= decoding
    with LLM(str(tmp_path), **SETTINGS, **KEEPS_ALL) as llm:
        assert max(usages(llm, [prompt], 100, monkeypatch)) == -(-699 // 16)


def test_more_long_requests_run_at_once_in_the_same_memory(tmp_path):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    prompts = [[i + 3] * 500 for i in range(12)]
    num_preemptions = {}
    for name, settings in {"freed": {}, "kept": KEEPS_ALL}.items():
        pool = {"num_gpu_blocks_override": 60, "enable_prefix_caching": False, "scheduler_reserve_full_isl": False}
        with LLM(str(tmp_path), **SETTINGS, **settings, **pool) as llm:
            outputs = run(llm, prompts, 64)
            num_preemptions[name] = sum(output.metrics.num_preemptions for output in outputs)
    assert num_preemptions["freed"] == 0 < num_preemptions["kept"]


def test_a_request_longer_than_all_pages_runs_where_windows_free_them(tmp_path):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    with LLM(str(tmp_path), **SETTINGS, num_gpu_blocks_override=9) as llm:
        (output,) = run(llm, [[5] * 600], 40)
        assert len(output.outputs[0].token_ids) == 40
