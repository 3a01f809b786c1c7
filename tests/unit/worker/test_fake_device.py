"""A device that exists only here: one constructor and one entry in the table of devices, and a model runs on it.

It computes by torch, counts calls, and runs decode steps as the graphs of a GPU would: from buffers that stay, padded
to one of a few sizes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.metadata import AttentionMetadata
from quire.core.kv_spec import KVCacheConfig
from quire.core.sampling_params import SamplingParams
from quire.executor.uniproc import UniProcExecutor
from quire.layers.kernels import TorchKernels
from quire.platforms import Platform
from quire.sample.ops.interface import TokenSampler
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.states import SamplingStates
from quire.utils.memory import GIB
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs, StepModel
from quire.worker.device.memory import DeviceMemory, KVCaches
from quire.worker.device.ops import DeviceOps
from quire.worker.device.registry import DEVICES
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache_tensors import allocate_kv_caches
from quire.worker.setup import WorkerSetup
from tests.unit.worker.driver import Driver, Job
from tests.unit.worker.tiny import NUM_BLOCKS, VOCAB_SIZE, cache_config, cpu_platform, tiny_config

BUCKETS = (1, 4, 16)
FREE_BYTES = GIB

calls: Counter[str] = Counter()


class FakeLayers(TorchKernels):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls["layers"] += 1
        return super().rms_norm(x, weight, eps)


class FakeAttention(TorchReferenceBackend):
    name = "fake"

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        calls["attention"] += 1
        return super().forward(params, query, key, value, kv_cache, metadata, sinks)


class FakeSampling(TorchSamplingOps):
    def make_chooser(self, states: SamplingStates) -> TokenSampler:
        calls["sampling"] += 1
        return super().make_chooser(states)


class FakeMemory(DeviceMemory):
    is_host = False

    def free_bytes(self) -> int:
        calls["memory"] += 1
        return FREE_BYTES

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def allocate_kv_caches(
        self, kv_cache_config: KVCacheConfig, layer_names: Sequence[str], backend: AttentionBackend, dtype: torch.dtype
    ) -> KVCaches:
        return KVCaches(*allocate_kv_caches(kv_cache_config, layer_names, backend, dtype, self.zeros))


class FakeGraphs(StepGraphs):
    def __init__(
        self, model: StepModel, attention: AttentionGroups, block_tables: BlockTables, max_tokens: int = 0
    ) -> None:
        self._model, self._attention, self._block_tables = model, attention, block_tables
        self._input_ids = {size: torch.zeros(size, dtype=torch.int32) for size in BUCKETS}
        self._positions = {size: torch.zeros(size, dtype=torch.int64) for size in BUCKETS}

    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        num_tokens = batch.num_tokens
        size = next((size for size in BUCKETS if num_tokens <= size), None)
        if size is None or num_tokens != batch.num_reqs:
            return None
        calls[f"graph of {size}"] += 1
        self._input_ids[size][:num_tokens] = batch.input_ids
        self._positions[size][:num_tokens] = batch.positions
        context = self._attention.forward_context(batch, self._block_tables)
        return self._model.forward(self._input_ids[size], self._positions[size], context)[:num_tokens]


def fake_device(setup: WorkerSetup) -> DeviceOps:
    return DeviceOps(
        device=torch.device("cpu"),
        layers=FakeLayers(),
        attention=FakeAttention(),
        sampling=FakeSampling(),
        memory=FakeMemory(),
        make_graphs=FakeGraphs,
    )


@pytest.fixture
def fake_platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setitem(DEVICES, "fake", fake_device)
    calls.clear()
    return dataclasses.replace(cpu_platform(), device="fake")


def jobs() -> list[Job]:
    wishes = [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 9, "presence_penalty": 0.5}, {"logprobs": 2, "min_p": 0.1}]
    prompts = [np.random.default_rng(i).integers(0, VOCAB_SIZE, 3 + 2 * i).tolist() for i in range(12)]
    return [Job(prompt, SamplingParams(max_tokens=4 + i, **wishes[i % 4]), seed=i) for i, prompt in enumerate(prompts)]


def run_on(platform: Platform) -> list[Job]:
    executor = UniProcExecutor(tiny_config(), platform)
    executor.initialize_kv_cache(cache_config(executor))
    done = jobs()
    Driver(executor, num_blocks=NUM_BLOCKS, seed=2).run(done, max_chunk=9, preempt_every=7)  # type: ignore[arg-type]
    return done


def test_a_model_on_another_device_gives_the_tokens_of_torch(fake_platform: Platform) -> None:
    expected = run_on(cpu_platform())
    assert not calls
    found = run_on(fake_platform)
    assert [job.output for job in found] == [job.output for job in expected]
    assert set(calls) == {"layers", "attention", "sampling", "memory", *(f"graph of {size}" for size in BUCKETS)}


def test_a_device_of_its_own_memory_gives_the_cache_all_that_is_left(fake_platform: Platform) -> None:
    assert UniProcExecutor(tiny_config(), cpu_platform(FREE_BYTES)).available_kv_cache_bytes() < FREE_BYTES // 100
    assert UniProcExecutor(tiny_config(), fake_platform).available_kv_cache_bytes() > FREE_BYTES // 3
