"""The memory of an engine core: divided by what is configured."""

from __future__ import annotations

from typing import Any

from quire.config import CacheConfig, ModelConfig, QuireConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative_forms import SpeculationSettings
from quire.core.drafts import DRAFTS_PER_REQUEST
from quire.core.kv_spec import KVCacheConfig
from quire.engine.core_factory import _plan_memory
from tests.unit.scheduler.cache_groups import make_spec


class Memory:
    """The memory of an executor whose model has attention and recurrent layers."""

    def kv_cache_specs(self) -> dict[str, Any]:
        return {"attention": make_spec("full", 0, 16), "recurrent": make_spec("state", 64, 16)}

    def available_kv_cache_bytes(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        pass


def num_states(**speculation: Any) -> int:
    config = QuireConfig(
        model=ModelConfig(model="leaf", max_model_len=64), cache=CacheConfig(block_size=16, num_state_checkpoints=0),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        speculation=SpeculationSettings(**speculation),
    )  # fmt: skip
    executor: Any = Memory()
    return _plan_memory(config, executor).kv_cache.pool_sizes()[1].num_blocks


def test_states_before_drafts_are_planned_where_there_may_be_some():
    assert num_states(spec_method="suffix", spec_tokens=4) == num_states() + DRAFTS_PER_REQUEST * 8
    assert num_states(speculative_config="off") == num_states()
