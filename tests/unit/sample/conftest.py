from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.sampler import Sampler, SamplerOutput
from quire.sample.states import SamplingStates

VOCAB_SIZE = 61


@dataclass
class Bench:
    """A sampler and its rows, with the few calls tests make."""

    states: SamplingStates
    sampler: Sampler

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        seed: int = 0,
        eos: int = -1,
    ) -> None:
        prompt = prompt or [0]
        token_ids = np.array([*prompt, *(output or [])], dtype=np.int32)
        self.states.add_row(row, params, token_ids, len(prompt), seed, eos)

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int] | None = None) -> SamplerOutput:
        at = np.array(positions if positions is not None else [1] * len(rows))
        return self.sampler.sample(logits.clone(), np.array(rows, dtype=np.int32), at)

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        self.states.append(np.array(rows, dtype=np.int32), np.array(token_ids, dtype=np.int32))


@pytest.fixture(scope="session", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    """Everything is tested by torch operations and by native kernels."""
    return NativeSamplingOps(NativeRuntime(num_threads=2)) if request.param == "native" else TorchSamplingOps()


@pytest.fixture
def make_bench(ops: SamplingOps) -> Callable[..., Bench]:
    def make(
        max_num_seqs: int = 8, vocab_size: int = VOCAB_SIZE, mode: str = "raw_logprobs", processors: tuple = ()
    ) -> Bench:
        cpu = torch.device("cpu")
        states = SamplingStates(max_num_seqs, vocab_size, cpu, processors, ops.apply_penalties_inplace)
        return Bench(states, Sampler(states, ops, mode))

    return make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
