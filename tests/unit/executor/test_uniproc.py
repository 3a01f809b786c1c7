from __future__ import annotations

import pytest

from quire.core.computed_step import ComputedStep
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineDeadError
from quire.executor.uniproc import UniProcExecutor
from tests.unit.worker.driver import Driver, Job
from tests.unit.worker.tiny import NUM_BLOCKS, cache_config, cpu_platform, tiny_config


def test_it_goes_from_loading_to_tokens_in_the_order_of_its_interface() -> None:
    executor = UniProcExecutor(tiny_config(), cpu_platform())
    specs = executor.kv_cache_specs()
    assert len(specs) == 2 and {spec.block_size for spec in specs.values()} == {4}
    assert executor.available_kv_cache_bytes() > 0
    executor.initialize_kv_cache(cache_config(executor))
    job = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
    Driver(executor, num_blocks=NUM_BLOCKS).run([job])  # type: ignore[arg-type]
    assert len(job.output) == 5


def test_shutting_down_twice_is_harmless_and_later_calls_say_so() -> None:
    executor = UniProcExecutor(tiny_config(), cpu_platform())
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.sample_tokens(ComputedStep())


def test_a_step_before_the_cache_is_allocated_is_a_bug_with_a_name() -> None:
    with pytest.raises(AssertionError, match="initialize_kv_cache comes before the first step"):
        UniProcExecutor(tiny_config(), cpu_platform()).sample_tokens(ComputedStep())


def test_custom_processors_are_loaded_by_name_and_checked_before_the_model_is() -> None:
    executor = UniProcExecutor(tiny_config(), cpu_platform(), ["quire.sample.penalties:Penalties"])
    executor.initialize_kv_cache(cache_config(executor))
    job = Job([1, 2], SamplingParams(temperature=0, max_tokens=3))
    Driver(executor, num_blocks=NUM_BLOCKS).run([job])  # type: ignore[arg-type]
    assert len(job.output) == 3
    with pytest.raises(ConfigError, match="malformed"):
        UniProcExecutor(tiny_config(), cpu_platform(), ["penalties"])
