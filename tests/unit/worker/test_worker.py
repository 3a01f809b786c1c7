from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.errors import NotEnoughMemoryError
from quire.executor.uniproc import UniProcExecutor
from quire.utils.memory import GIB, MIB
from tests.unit.worker.driver import Driver, Job
from tests.unit.worker.tiny import NUM_BLOCKS, VOCAB_SIZE, cache_config, cpu_platform, tiny_arch, tiny_config


def make_executor(**overrides: object) -> UniProcExecutor:
    executor = UniProcExecutor(tiny_config(**overrides), cpu_platform())
    executor.initialize_kv_cache(cache_config(executor))
    return executor


def run(jobs: list[Job], *, seed: int = 0, max_chunk: int = 10_000, preempt_every: int = 0) -> list[Job]:
    driver = Driver(make_executor(), num_blocks=NUM_BLOCKS, seed=seed)  # type: ignore[arg-type]
    driver.run(jobs, max_chunk=max_chunk, preempt_every=preempt_every, shuffle=True)
    return jobs


def seeded_job(number: int) -> Job:
    prompt = np.random.default_rng(number).integers(0, VOCAB_SIZE, 3 + number % 40).tolist()
    values = [{}, {"top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.2}, {"min_p": 0.02, "presence_penalty": 0.4}]
    return Job(prompt, SamplingParams(temperature=0.9, max_tokens=24, **values[number % 4]), seed=1000 + number)


@pytest.fixture(scope="module")
def tokens_alone() -> list[list[int]]:
    torch.set_num_threads(1)
    return [run([seeded_job(number)])[0].output for number in (37, 38, 39, 40)]


SCHEDULES = {
    "in_a_batch_of_64": {},
    "with_prompts_in_chunks_of_7": {"max_chunk": 7},
    "preempted_and_resumed": {"preempt_every": 5},
    "chunked_and_preempted": {"max_chunk": 7, "preempt_every": 11},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_seeded_request_gets_the_same_tokens(schedule: str, tokens_alone: list[list[int]]) -> None:
    jobs = run([seeded_job(number) for number in range(64)], seed=4, **SCHEDULES[schedule])
    assert [jobs[number].output for number in (37, 38, 39, 40)] == tokens_alone
    assert len({tuple(job.output) for job in jobs}) == 64, "every request has its own random numbers"
    if "preempt_every" in SCHEDULES[schedule]:
        assert sum(job.num_preemptions for job in jobs) >= 10
        assert any(jobs[number].num_preemptions for number in (37, 38, 39, 40))


def test_the_budget_is_capped_at_what_all_rows_at_their_longest_fill(caplog: pytest.LogCaptureFixture) -> None:
    executor = UniProcExecutor(tiny_config(), cpu_platform())
    with caplog.at_level(logging.INFO, logger="quire"):
        available = executor.available_kv_cache_bytes()
    page_bytes = sum(spec.page_size_bytes for spec in executor.kv_cache_specs().values())
    assert available == (64 * 32 + 1) * page_bytes
    assert "weights" in caplog.text and "workspace" in caplog.text and "limited by" in caplog.text


def test_without_the_cap_the_cache_takes_what_is_left() -> None:
    executor = UniProcExecutor(tiny_config(max_model_len=256, max_num_seqs=20_000), cpu_platform(1 * GIB))
    available = executor.available_kv_cache_bytes()
    assert 0.4 * GIB < available < 0.9 * GIB


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    arch = tiny_arch(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    with pytest.raises(NotEnoughMemoryError, match="weights") as caught:
        UniProcExecutor(tiny_config(arch=arch), cpu_platform(2 * GIB))
    assert caught.value.hint and "GiB is available" in caught.value.hint


def test_a_cache_that_the_machine_cannot_hold_is_refused_with_the_size_that_fits() -> None:
    executor = UniProcExecutor(tiny_config(), cpu_platform(512 * MIB))
    with pytest.raises(NotEnoughMemoryError, match="does not fit") as caught:
        executor.initialize_kv_cache(cache_config(executor, num_blocks=10_000_000))
    assert caught.value.hint and "kv_cache_memory_bytes <=" in caught.value.hint


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_a_config_that_was_not_resolved_is_a_bug_with_a_name(field: str) -> None:
    with pytest.raises(AssertionError, match=f"{field} is missing: the config did not go through config.resolve"):
        UniProcExecutor(tiny_config(**{field: None}), cpu_platform())


def test_the_worker_uses_the_configured_number_of_threads() -> None:
    make_executor(num_threads=2)
    assert torch.get_num_threads() == 2
    make_executor(num_threads=None)
    assert torch.get_num_threads() == 1


def test_the_warm_up_touches_no_page_that_requests_get() -> None:
    executor = make_executor()
    runner = executor._worker._runner  # type: ignore[union-attr]
    for cache in runner._attention._kv_caches:  # type: ignore[union-attr]
        blocks = cache.transpose(0, 1)  # [num_blocks, 2, ...]
        assert blocks.shape[0] == NUM_BLOCKS and bool((blocks[1:] == 0).all()) and not bool((blocks[0] == 0).all())
