"""Recorded chains: what passes called one by one give, ended where no row goes on, and refused where they cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.native import elementwise, linear
from quire.kernels.native.runtime import NativeRuntime
from quire.worker.device.draft_chains import ChainTokens
from quire.worker.device.recorded_chains import MAX_ROWS, RecordedChains
from tests.unit.worker.test_recorded_steps import SIZE, VOCAB, Attention, Model, Tables

NUM_DRAFTS = 5


class Places(Attention):
    """Notes where tokens of each pass are computed."""

    num_blocks = 8

    def context_of(self, per_group: Any) -> Any:
        self.metadata = per_group[0]
        return per_group[0].slot_mapping


class Blocks(Tables):
    """Blocks of 4 tokens."""

    block_sizes = (4,)

    def slots(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        found: np.ndarray = (rows + 1) * 4 + positions % 4
        return found


class Chain(Model):
    """The next token follows from the newest and from what was computed of those before it."""

    hidden_shape, num_places, dtype = (SIZE,), 1, torch.float32
    slots: list[torch.Tensor]

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: Any) -> Any:
        self.num_calls += 1
        self.slots = [*getattr(self, "slots", []), context]
        x = linear.gather_rows(self.runtime, input_ids, self.table, SIZE)
        both = elementwise.multiply(self.runtime, x, hidden)
        both = both * 2 if self.beside else both
        return elementwise.rms_norm(self.runtime, both, self.weight, 1e-5)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear.linear(self.runtime, hidden, self.table, VOCAB, out_dtype=torch.float32)


def chains_of(model: Chain) -> RecordedChains:
    chains = RecordedChains(model.runtime, model, Places(), Blocks(), NUM_DRAFTS)  # type: ignore[arg-type]
    chains.capture(60.0)
    return chains


def hidden_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(num_rows))


def expected(model: Chain, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[NUM_DRAFTS, n] ids and probabilities, pass by pass."""
    ids, scores = [], []
    for _ in range(NUM_DRAFTS):
        logits = model.compute_logits(hidden)
        ids.append(logits.argmax(1))
        scores.append(torch.softmax(logits, 1).max(1).values)
        hidden = model.forward(ids[-1], hidden, torch.zeros(0), None)
    return torch.stack(ids).numpy(), torch.stack(scores).numpy()


def run(chains: RecordedChains, num_rows: int, most: list[int], least_chance: float = 0.0) -> ChainTokens:
    places = np.arange(num_rows), np.full(num_rows, 7), np.array(most)
    found = chains.run(hidden_of(num_rows), *places, least_chance)
    assert found is not None
    return ChainTokens(*(array.copy() for array in found))


def test_a_chain_gives_what_its_passes_give_one_by_one():
    model = Chain(NativeRuntime(num_threads=2))
    chains = chains_of(model)
    num_calls = model.num_calls
    for num_rows in range(1, MAX_ROWS + 1):
        ids, scores = expected(model, hidden_of(num_rows))
        num_calls += NUM_DRAFTS
        found = run(chains, num_rows, [NUM_DRAFTS] * num_rows)
        assert np.array_equal(found.token_ids, ids)
        assert np.allclose(found.scores, scores, rtol=1e-4)
    assert model.num_calls == num_calls, "replayed, not called"
    assert chains.run(hidden_of(5), np.arange(5), np.full(5, 7), np.full(5, 3), 0.0) is None


def test_a_chain_ends_with_the_last_row_that_goes_on():
    model = Chain(NativeRuntime())
    chains = chains_of(model)
    ids, scores = expected(model, hidden_of(2))
    assert np.array_equal(run(chains, 2, [1, 3]).token_ids, ids[:3])
    chances = np.cumprod(scores, axis=0).max(axis=1)
    for num_run in (1, 2, 3):
        found = run(chains, 2, [5, 5], float(chances[num_run - 1]) * 1.01)
        assert np.array_equal(found.token_ids, ids[:num_run])


def test_a_row_writes_where_its_own_drafts_are_and_nowhere_else():
    model = Chain(NativeRuntime())
    run(chains_of(model), 2, [2, 4])
    of_two_rows = [slots.tolist() for slots in model.slots if len(slots) == 2][: NUM_DRAFTS - 1]
    assert of_two_rows[:3] == [[4 + 3, 8 + 3], [-1, 8 + 0], [-1, 8 + 1]]


def test_logits_that_are_no_numbers_give_no_draft():
    chains = chains_of(Chain(NativeRuntime()))
    hidden = hidden_of(2)
    hidden[0] = np.nan
    found = chains.run(hidden, np.arange(2), np.full(2, 7), np.full(2, NUM_DRAFTS), 0.0)
    assert found is not None
    assert (found.token_ids[:, 0] == -1).all() and not found.scores[:, 0].any()
    assert (found.token_ids[:, 1] >= 0).all() and len(found.token_ids) == NUM_DRAFTS


@pytest.mark.parametrize("beside", ["between"])
@torch.inference_mode()
def test_a_model_that_computes_beside_its_kernels_is_not_captured(beside: str):
    chains = chains_of(Chain(NativeRuntime(), beside))
    assert chains.run(hidden_of(1), np.arange(1), np.full(1, 7), np.full(1, 3), 0.0) is None
