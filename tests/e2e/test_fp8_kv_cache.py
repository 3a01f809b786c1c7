"""Keys and values of eight bits: the same bits in every circumstance, and room for twice the tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire import LLM
from quire.kernels.native.library import supported_tiers
from tests.e2e.same_bits import CIRCUMSTANCES, Answer, make_requests, run
from tests.effort import effort

COUNT = 12
CASES: dict[str, dict[str, Any]] = {
    **{name: CIRCUMSTANCES[name] for name in ("batches of 17", "one thread", "chunks of 7", "cached")},
    "preempted": {"max_num_seqs": 17, "num_gpu_blocks_override": 16, "scheduler_reserve_full_isl": False},
    **{f"tier {tier}": {"max_num_seqs": 17, "kernel_tier": tier} for tier in supported_tiers()},
}


def answers_of(kv_cache_dtype: str, name: str = "alone", **settings: Any) -> tuple[list[Answer], int]:
    prompts, params = make_requests(COUNT, 3000, *effort((6, 100), (12, 300)))
    settings = settings or CIRCUMSTANCES["alone"]
    return run("leaf", prompts, params, warm=name == "cached", kv_cache_dtype=kv_cache_dtype, **settings)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Answer]]:
    return {kv_cache_dtype: answers_of(kv_cache_dtype)[0] for kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2")}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "name"), [*(("fp8_e4m3", name) for name in CASES), ("fp8_e5m2", "batches of 17")]
)
def test_answers_are_the_same_bits(alone: dict[str, list[Answer]], kv_cache_dtype: str, name: str):
    found, num_preemptions = answers_of(kv_cache_dtype, name, **CASES[name])
    assert found == alone[kv_cache_dtype]
    assert num_preemptions or name != "preempted"


def test_fp8_is_e4m3_and_differs_from_the_exact_cache():
    expected = answers_of("fp8_e4m3", **CASES["batches of 17"])
    assert answers_of("fp8", **CASES["batches of 17"]) == expected
    assert answers_of("auto", **CASES["batches of 17"]) != expected


def test_the_same_memory_holds_twice_the_pages():
    num_pages = {}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("quire.engine.core_factory")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for kv_cache_dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
            settings = {"max_model_len": 512, "num_threads": 1, "kv_cache_memory_bytes": 8 << 20}
            with LLM("leaf", kv_cache_dtype=kv_cache_dtype, **settings):
                [line] = [record for record in records if record.getMessage().startswith("KV cache: ")]
            num_pages[kv_cache_dtype] = int(line.getMessage().split()[2])
            records.clear()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert num_pages["bfloat16"] > 10
    assert num_pages["fp8_e4m3"] == num_pages["fp8_e5m2"]
    assert num_pages["fp8_e4m3"] in (2 * num_pages["bfloat16"], 2 * num_pages["bfloat16"] + 1)
