"""`max_model_len=-1`: the longest of which one request fits the KV cache, found before the model is loaded."""

from __future__ import annotations

import dataclasses

import pytest

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.resolve import Decision
from quire.engine.config_lookup import look_up
from quire.engine.core_factory import _plan_memory
from quire.errors import NotEnoughMemoryError
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.utils.memory import GIB, MIB, MemoryInfo
from tests.unit.engine.test_core_factory import Memory


def with_memory(num_bytes: int) -> Platform:
    memory = MemoryInfo(total_bytes=num_bytes, available_bytes=num_bytes, limited_by="test")
    return dataclasses.replace(detect_platform("cpu"), memory=memory)


def looked_up(num_bytes: int = 8 * GIB, **settings: object) -> tuple[QuireConfig, dict[str, Decision]]:
    """Of the embedded model with long sequences, on a CPU with so much memory."""
    values = {"model": "leaf", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 256, **settings}
    values.setdefault("hf_overrides", {"max_position_embeddings": 1 << 20})
    config, _, decisions = look_up(build_config(max_model_len=-1, **values), with_memory(num_bytes))
    return config, {one.name: one for one in decisions}


def test_more_memory_is_a_longer_length_up_to_the_models_own():
    lengths = [looked_up(int(gib * GIB))[0].max_model_len for gib in (1.25, 1.5, 2, 64)]
    assert sorted(set(lengths)) == lengths and lengths[-1] == 1 << 20


def test_it_is_said_what_was_chosen_and_why():
    config, decisions = looked_up(2 * GIB)
    chosen = decisions["max_model_len"]
    assert chosen.value == config.max_model_len and config.has_longest_length
    assert "the longest that fits a KV cache of" in chosen.reason and "at most 1048576" in chosen.reason
    config, decisions = looked_up(hf_overrides={})
    assert config.max_model_len == 2048 and decisions["max_model_len"].reason.endswith("which fits the KV cache")


def test_a_given_kv_cache_decides():
    config, _ = looked_up(num_gpu_blocks_override=9, block_size=32)
    assert config.max_model_len == 8 * 32 + 1
    longer, shorter = (looked_up(kv_cache_memory_bytes=size * MIB)[0].max_model_len for size in (8, 4))
    assert longer > shorter > 0


def test_without_chunked_prefill_a_step_holds_the_longest_prompt():
    assert looked_up(enable_chunked_prefill=False)[0].max_model_len == 256


def test_a_drafting_model_takes_its_part():
    plain, drafting = (
        looked_up(2 * GIB),
        looked_up(2 * GIB, spec_method="draft_model", spec_model="leaf", spec_tokens=2),
    )
    assert 0 < drafting[0].max_model_len < plain[0].max_model_len


def test_too_little_memory_for_any_length_is_refused():
    with pytest.raises(NotEnoughMemoryError, match="the model needs"):
        looked_up(600 * MIB)
    with pytest.raises(NotEnoughMemoryError, match="max_model_len=-1"):
        looked_up(kv_cache_memory_bytes=1)


def test_requests_end_earlier_where_less_is_free_than_was_estimated():
    config, _ = looked_up(num_gpu_blocks_override=9, block_size=16)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, num_blocks=None))
    executor = Memory()
    assert _plan_memory(config, executor).max_model_len == config.max_model_len
    executor.available_kv_cache_bytes = lambda: 1500  # type: ignore[method-assign]
    assert 0 < _plan_memory(config, executor).max_model_len < config.max_model_len
