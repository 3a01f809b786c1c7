"""The scans of Mamba 1 and 2 against their references: the same bits from every tier, however prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.state_space import mamba2_scan, mamba_scan
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference import state_space as reference
from quire.kernels.state_layout import from_lanes, in_lanes
from tests.each import each
from tests.kernels.native.guards import assert_close, guarded, randn, same_bits
from tests.kernels.native.recurrent_steps import batch_of, chunks_of

# One rounding of results that are sums of some terms of a few units each.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 3e-6}
NUM_BLOCKS = 6


class Mamba:
    """Inputs of a scan of Mamba 1."""

    def __init__(self, num_tokens: int, inner_size: int, state_size: int, dtype: torch.dtype) -> None:
        self.rows = {
            "x": randn(num_tokens, inner_size, dtype=dtype),
            "time_step": (randn(num_tokens, inner_size, seed=1) * 3).to(dtype),
            "b": randn(num_tokens, state_size, dtype=dtype, seed=2),
            "c": randn(num_tokens, state_size, dtype=dtype, seed=3),
            "gate": randn(num_tokens, inner_size, dtype=dtype, seed=4),
        }
        self.a = in_lanes(-randn(inner_size, state_size).exp())
        self.skip = randn(inner_size, seed=5)
        self.states = torch.stack([in_lanes(randn(inner_size, state_size, seed=i)) for i in range(NUM_BLOCKS)])

    def packed(self) -> torch.Tensor:
        """The states in a cache where other bytes lie between them."""
        return torch.cat((self.states.flatten(1), torch.full((NUM_BLOCKS, 5), 7.0)), 1)

    def run(
        self,
        runtime: NativeRuntime,
        cache: torch.Tensor,
        batch: RecurrentBatch,
        rows: list[int] | None = None,
        **out: Any,
    ) -> torch.Tensor:
        states = cache[:, :-5].view(self.states.shape)
        given = self.rows if rows is None else {name: tensor[rows] for name, tensor in self.rows.items()}
        return mamba_scan(runtime, **given, a=self.a, skip=self.skip, states=states, batch=batch, **out)

    def expected(self, batch: RecurrentBatch) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.states.clone()
        result = reference.mamba_scan(**self.rows, a=self.a, skip=self.skip, states=states, batch=batch)
        return result, states.flatten(1)


class Mamba2:
    """Inputs of a scan of Mamba 2."""

    def __init__(self, num_tokens: int, head_size: int, state_size: int, dtype: torch.dtype) -> None:
        heads, self.num_groups = 6, 2
        self.rows = {
            "x": randn(num_tokens, heads * head_size, dtype=dtype),
            "time_step": (randn(num_tokens, heads, seed=1) * 3).to(dtype),
            "b": randn(num_tokens, self.num_groups * state_size, dtype=dtype, seed=2),
            "c": randn(num_tokens, self.num_groups * state_size, dtype=dtype, seed=3),
            "gate": randn(num_tokens, heads * head_size, dtype=dtype, seed=4),
        }
        self.heads = {"a": -randn(heads).exp(), "skip": randn(heads, seed=5), "time_step_bias": randn(heads, seed=6)}
        self.states = randn(NUM_BLOCKS, heads, state_size, head_size, seed=7)
        self.options = {"num_groups": self.num_groups, "time_step_range": (0.05, 2.5)}

    def packed(self) -> torch.Tensor:
        """The states in a cache where other bytes lie between them."""
        return torch.cat((self.states.flatten(1), torch.full((NUM_BLOCKS, 5), 7.0)), 1)

    def run(
        self,
        runtime: NativeRuntime,
        cache: torch.Tensor,
        batch: RecurrentBatch,
        rows: list[int] | None = None,
        **out: Any,
    ) -> torch.Tensor:
        states = cache[:, :-5].view(self.states.shape)
        given = self.rows if rows is None else {name: tensor[rows] for name, tensor in self.rows.items()}
        return mamba2_scan(runtime, **given, **self.heads, **self.options, states=states, batch=batch, **out)

    def expected(self, batch: RecurrentBatch) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.states.clone()
        result = reference.mamba2_scan(**self.rows, **self.heads, **self.options, states=states, batch=batch)
        return result, states.flatten(1)


SCANS = [
    (Mamba, 1, 1),
    (Mamba, 16, 16),
    (Mamba, 75, 5),
    (Mamba2, 3, 7),
    (Mamba2, 16, 16),
    (Mamba2, 50, 3),
    (Mamba2, 64, 8),
]


@each("dtype", TOLERANCE)
@each(("kind", "size", "state_size"), SCANS)
def test_scans_equal_their_references(
    runtime: NativeRuntime, portable: NativeRuntime, kind: Any, size: int, state_size: int, dtype: torch.dtype
):
    # A new prompt, a prompt that goes on, one token after two, none; states move from some blocks to others.
    batch = batch_of([9, 4, 1, 0], read=[-1, 1, 2, 0], write=[5, 1, 3, 0])
    scan = kind(14, size, state_size, dtype)
    given = guarded(scan.packed())
    out = guarded(torch.zeros_like(scan.rows["x"]))
    scan.run(runtime, given.tensor, batch, out=out.tensor)
    expected, states = scan.expected(batch)
    assert_close(out.tensor, expected, atol=30 * TOLERANCE[dtype] / 4, rtol=TOLERANCE[dtype])
    assert_close(given.tensor[:, :-5], states, atol=3e-5, rtol=3e-6)
    assert bool((given.tensor[:, -5:] == 7.0).all())
    plain = scan.packed()
    assert same_bits(out.tensor, scan.run(portable, plain, batch)) and same_bits(given.tensor, plain)
    out.assert_bands()
    given.assert_bands()


@each("dtype", TOLERANCE)
@each("kind", [Mamba, Mamba2])
def test_prompts_give_the_same_bits_however_they_are_cut(runtime: NativeRuntime, kind: Any, dtype: torch.dtype):
    lengths = [1, 20, 7, 3]
    scan = kind(sum(lengths), 40, 9, dtype)
    whole = scan.packed()
    expected = scan.run(runtime, whole, batch_of(lengths))
    for chunk in (1, 2, 7):
        cut, out = scan.packed(), torch.zeros_like(expected)
        for batch, rows in chunks_of(lengths, chunk):
            out[rows] = scan.run(runtime, cut, batch, rows)
        assert same_bits(out, expected) and same_bits(cut, whole)


@each("kind", [Mamba, Mamba2])
def test_rows_may_be_strided_and_gates_left_out(runtime: NativeRuntime, kind: Any):
    batch = batch_of([5, 3], read=[-1, 2])
    scan = kind(8, 40, 9, torch.bfloat16)
    expected = scan.run(runtime, scan.packed(), batch)
    scan.rows = {name: torch.cat((rows, rows), 1)[:, : rows.shape[1]] for name, rows in scan.rows.items()}
    assert same_bits(expected, scan.run(runtime, scan.packed(), batch))
    scan.rows["gate"] = None
    assert_close(scan.run(runtime, scan.packed(), batch), scan.expected(batch)[0], atol=0.03, rtol=2.0**-8)


def test_channels_lie_side_by_side():
    rows = randn(35, 4)
    lanes = in_lanes(rows)
    assert lanes.shape == (3, 4, 16) and lanes[1, 3, 5] == rows[21, 3] and not lanes[2, :, 3:].any()
    assert same_bits(from_lanes(lanes, 35), rows)


def test_time_steps_of_any_size_stay_accurate(runtime: NativeRuntime):
    """With zero states and b, c, x of ones, a result is the time step itself: softplus."""
    steps = torch.cat((torch.linspace(-90, 90, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf])))
    ones, batch = torch.ones(1, len(steps)), batch_of([1], write=[0])
    a, states = in_lanes(-torch.ones(len(steps), 1)), torch.zeros(1, *in_lanes(torch.zeros(len(steps), 1)).shape)

    def softplus_of(steps: torch.Tensor) -> torch.Tensor:
        one = torch.ones(1, 1)
        return mamba_scan(runtime, ones, steps.view(1, -1), one, one, None, a, 0 * ones[0], states, batch)[0]

    actual, expected = softplus_of(steps), torch.nn.functional.softplus(steps.double(), threshold=1000)
    assert_close(actual.nan_to_num(posinf=3e38), expected.nan_to_num(posinf=3e38), atol=1e-37, rtol=4e-7)
    assert bool(softplus_of(torch.full_like(steps, torch.nan)).isnan().all())


def test_decays_of_any_size_stay_accurate(runtime: NativeRuntime):
    """With a state, c of ones and x of zeros, a result is the decay itself: exp(a), where the time step is 1."""
    decays = -torch.cat((torch.linspace(0, 120, 4001), torch.tensor([0.0, 1e-30, 87.29, 87.31, 1e30, torch.inf])))
    size = len(decays)
    a, states = in_lanes(decays.view(-1, 1)), torch.ones(1, *in_lanes(decays.view(-1, 1)).shape)
    zeros, one = torch.zeros(1, size), torch.ones(1, 1)
    step = torch.full((1, size), 1.0).expm1().log()  # softplus of it is 1
    batch = batch_of([1], read=[0], write=[0])
    actual = mamba_scan(runtime, zeros, step, one, one, None, a, zeros[0], states, batch)[0]
    # The time step is 1 within an ulp, which the exponent multiplies.
    assert_close(actual, decays.double().exp(), atol=1.25e-38, rtol=2e-5)
    assert bool((actual[decays < -88] == 0).all()) and bool((actual >= 0).all())


WRONG: dict[str, tuple[type, dict[str, Any]]] = {
    "another number of channels": (Mamba, {"time_step": randn(5, 41)}),
    "another number of tokens": (Mamba, {"c": randn(4, 9)}),
    "another dtype": (Mamba, {"b": randn(5, 9, dtype=torch.bfloat16)}),
    "columns that are strided": (Mamba, {"gate": randn(40, 5).T}),
    "heads that do not divide": (Mamba2, {"x": randn(5, 6 * 40 + 1)}),
    "groups that do not divide": (Mamba2, {"b": randn(5, 19)}),
}


@each(("kind", "wrong"), WRONG.values())
def test_impossible_tensors_are_refused(runtime: NativeRuntime, kind: Any, wrong: dict[str, torch.Tensor]):
    scan = kind(5, 40, 9, torch.float32)
    cache = scan.packed()
    scan.rows.update(wrong)
    with pytest.raises(ShapeError):
        scan.run(runtime, cache, batch_of([5]))
    assert same_bits(cache, kind(5, 40, 9, torch.float32).packed())


@each("kind", [Mamba, Mamba2])
def test_memory_that_is_written_is_nobody_elses(runtime: NativeRuntime, kind: Any):
    scan = kind(5, 40, 9, torch.float32)
    for wrong in (batch_of([3, 2], write=[2, 2]), batch_of([3, 2], read=[-1, 2], write=[2, 3])):
        with pytest.raises(ShapeError, match="another one"):
            scan.run(runtime, scan.packed(), wrong)
    with pytest.raises(ShapeError, match="shares memory"):
        scan.run(runtime, scan.packed(), batch_of([5]), out=scan.rows["gate"])
