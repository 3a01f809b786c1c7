"""Models with sliding windows free the pages behind them, and answer with the same bits as when they keep them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.draft_stats import merged_drafts
from quire.engine.core import EngineCore
from quire.scheduler.scheduler import Scheduler
from quire.worker.model_runner import ModelRunner
from tests.e2e.same_bits import Answer, answers
from tests.e2e.test_parity_with_transformers import MAX_TOKENS, Reference, random_prompts
from tests.models.checkpoints import make_checkpoint
from tests.robustness.oracle import Oracle, drafting

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
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
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
        {
            "num_gpu_blocks_override": 50,
            "scheduler_reserve_full_isl": False,
            "preemption_mode": "swap",
            "swap_space": 0.01,
        },
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


def run_watched(
    llm: LLM, prompts: list[list[int]], max_tokens: int, before_step: Callable[[ModelRunner], int]
) -> tuple[list[Any], list[int]]:
    """The outputs, and what was seen before each step."""
    seen: list[int] = []
    execute = ModelRunner.execute_model

    def watch(runner: ModelRunner, scheduled: Any) -> Any:
        seen.append(before_step(runner))
        return execute(runner, scheduled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "execute_model", watch)
        return run(llm, prompts, max_tokens), seen


@pytest.mark.parametrize("backend", ["native_cpu", "torch_reference"])
def test_neither_pages_that_left_a_window_nor_the_null_page_are_ever_read(model, kept, backend):
    path, reference, _ = model
    with LLM(str(path), **SETTINGS, enable_prefix_caching=False, attention_backend=backend) as llm:
        pool, prompts = scheduler_of(llm)._kv._pool, prompts_of(reference)[:7]
        clean = answers(run(llm, prompts))
        assert clean == kept[:7] or backend == "torch_reference"

        def poison(runner: ModelRunner) -> int:
            is_free = torch.from_numpy(pool.ref_counts() == 0)
            for cache in runner._attention._kv_caches:
                pages = cache if len(cache) == len(is_free) else cache.transpose(0, 1)
                pages[is_free] = float("nan")
            return int(is_free.sum())

        outputs, num_poisoned = run_watched(llm, prompts, 16, poison)
        assert answers(outputs) == clean and min(num_poisoned) > 0


@pytest.mark.parametrize("drafter", ["oracle", "itself"])
def test_drafts_change_no_bit_where_pages_leave_windows(model, kept, drafter):
    path, reference, num_groups = model
    prompts = prompts_of(reference)
    settings: dict[str, Any] = {"scheduler_reserve_full_isl": False}
    with ExitStack() as stack:
        if drafter == "itself":  # its own layers free no pages
            settings["speculative_config"] = {
                "method": "draft_model", "model": str(path), "enable_adaptive_verification": False
            }  # fmt: skip
        else:
            settings["num_gpu_blocks_override"] = 12 if num_groups == 1 else 50
            known = [(prompt, answer[0]) for prompt, answer in zip(prompts, kept, strict=True)]
            stack.enter_context(drafting(Oracle(known, reference.model.config.vocab_size)))
        llm = stack.enter_context(LLM(str(path), **SETTINGS, **settings))
        outputs = run(llm, prompts)
        assert answers(outputs) == kept
        drafts = merged_drafts(one.outputs[0].spec_decode_metrics for one in outputs)
        assert drafts is not None and 0 < drafts.num_accepted < drafts.num_drafted
        assert drafter == "itself" or sum(output.metrics.num_preemptions for output in outputs) > 0
        assert scheduler_of(llm)._kv.usage == 0.0


def num_used_pages(llm: LLM) -> int:
    pool = scheduler_of(llm)._kv._pool
    return pool.num_usable_blocks - pool.num_free_blocks


def test_a_windowed_model_holds_no_more_pages_than_window_and_chunk_take_however_long_it_runs(tmp_path):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    prompts = [[random.Random(1).randrange(200) for _ in range(600)]]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        _, pages = run_watched(llm, prompts, 100, lambda runner: num_used_pages(llm))
        assert max(pages) <= -(-(WINDOW + 64 - 1) // 16) + 1
        assert max(pages[-90:]) <= -(-WINDOW // 16) + 1
    with LLM(str(tmp_path), **SETTINGS, **KEEPS_ALL) as llm:
        _, pages = run_watched(llm, prompts, 100, lambda runner: num_used_pages(llm))
        assert max(pages) == -(-699 // 16)


def test_more_long_requests_run_at_once_in_the_same_memory(tmp_path):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    prompts = [[i + 3] * 300 for i in range(8)]
    pool = {"num_gpu_blocks_override": 32, "enable_prefix_caching": False}
    most_running = []
    for settings in ({}, KEEPS_ALL):
        with LLM(str(tmp_path), **SETTINGS, **settings, **pool) as llm:
            _, running = run_watched(llm, prompts, 60, lambda runner: scheduler_of(llm).get_request_counts()[0])
            most_running.append(max(running))
    freed, kept = most_running
    assert (freed, kept) == (8, 1)


def test_a_request_longer_than_all_pages_runs_where_windows_free_them(tmp_path):
    make_checkpoint("mistral", tmp_path, sliding_window=WINDOW)
    with LLM(str(tmp_path), **SETTINGS, num_gpu_blocks_override=9) as llm:
        (output,) = run(llm, [[5] * 600], 40)
        assert len(output.outputs[0].token_ids) == 40


def test_answers_to_one_prompt_share_it_also_where_windows_free_pages(model):
    path, reference, _ = model
    prompts = [prompt for prompt in prompts_of(reference) if len(prompt) > 30][:6]
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=10, ignore_eos=True)
    texts = []
    for settings in ({}, {"max_num_seqs": 2}, KEEPS_ALL):
        with LLM(str(path), **{**SETTINGS, **settings, "enable_prefix_caching": False}) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            texts.append([[answer.token_ids for answer in output.outputs] for output in outputs])
    assert texts[0] == texts[1] == texts[2]
