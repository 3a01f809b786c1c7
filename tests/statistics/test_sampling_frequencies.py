"""Over many draws, frequencies match the exact distribution: chi-square p > 0.01 at fixed seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from quire.core.sampling_params import SamplingParams
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.sampler import Sampler
from quire.sample.states import SamplingStates
from tests.effort import effort

VOCAB_SIZE = 60
NUM_ROWS = 500
NUM_STEPS = effort(100, 400)
PROMPT, OUTPUT = [1, 2, 3, 3, 9], [5, 9, 5, 5, 20]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "high_temperature": {"temperature": 1.8},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.1},
    "all_filters": {"temperature": 1.4, "top_k": 25, "top_p": 0.9, "min_p": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 1.2},
    "penalties_and_filters": {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.6,
        "top_k": 30,
        "top_p": 0.95,
    },
}


def exact_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition, in float64, for one line."""
    x = logits.astype(np.float64).copy()
    for token_id in set(PROMPT) | set(OUTPUT):
        x[token_id] *= params.repetition_penalty if x[token_id] <= 0 else 1 / params.repetition_penalty
    for token_id in set(OUTPUT):
        x[token_id] -= params.frequency_penalty * OUTPUT.count(token_id) + params.presence_penalty
    p = np.exp(x / params.temperature)
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    mass_before = np.cumsum(p[order]) - p[order]
    p[order[mass_before >= params.top_p]] = 0.0
    return p / p.sum()


def draw_many(logits: np.ndarray, params: SamplingParams, ops: SamplingOps, *, by_seed: bool) -> np.ndarray:
    """[NUM_ROWS * NUM_STEPS] tokens: each row its own seed, or one seed and ever new positions."""
    states = SamplingStates(NUM_ROWS, VOCAB_SIZE, torch.device("cpu"), apply_penalties=ops.apply_penalties_inplace)
    sampler = Sampler(states, ops)
    token_ids = np.array(PROMPT + OUTPUT, dtype=np.int32)
    for row in range(NUM_ROWS):
        states.add_row(row, params, token_ids, len(PROMPT), seed=row - 7 if by_seed else 1234)
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    line = torch.from_numpy(logits)
    drawn = []
    for step in range(NUM_STEPS):
        positions = np.full(NUM_ROWS, 10 + step) if by_seed else 10 + step * NUM_ROWS + np.arange(NUM_ROWS)
        drawn.append(sampler.sample(line.repeat(NUM_ROWS, 1), rows, positions).token_ids)
    return np.concatenate(drawn)


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    return NativeSamplingOps(NativeRuntime()) if request.param == "native" else TorchSamplingOps()


@pytest.mark.parametrize("by_seed", [True, False], ids=["over_seeds", "over_positions"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_match_the_exact_distribution(case: str, by_seed: bool, ops: SamplingOps) -> None:
    params = SamplingParams(**CASES[case])
    logits = np.random.default_rng(11).normal(0.0, 1.6, VOCAB_SIZE).astype(np.float32)
    probs = exact_distribution(logits, params)
    tokens = draw_many(logits, params, ops, by_seed=by_seed)
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert len(tokens) == NUM_ROWS * NUM_STEPS
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    result = chisquare(counts[possible], probs[possible] * len(tokens))
    assert result.pvalue > 0.01
