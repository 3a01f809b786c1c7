"""Causal convolution against its reference, with the same bits from every tier and however prompts are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.causal_conv import causal_conv
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference import causal_conv as reference
from tests.each import each
from tests.kernels.native.guards import assert_close, guarded, randn, same_bits
from tests.kernels.native.recurrent_steps import batch_of, chunks_of

# One rounding of values below 8.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 3e-6}
NUM_BLOCKS = 6


def states_of(conv_size: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of a cache in which other layers' bytes lie between states."""
    return randn(NUM_BLOCKS, (conv_size - 1) * channels + 7, dtype=dtype, seed=5)


def view_of(cache: torch.Tensor, conv_size: int, channels: int) -> torch.Tensor:
    return cache[:, : (conv_size - 1) * channels].view(NUM_BLOCKS, conv_size - 1, channels)


@each("dtype", TOLERANCE)
@each("channels", [1, 16, 33, 530])
@each(("conv_size", "has_silu", "has_bias"), [(4, True, False), (3, False, True), (2, True, True)])
def test_it_equals_its_reference(
    runtime: NativeRuntime, portable: NativeRuntime, dtype: torch.dtype, channels: int, conv_size: int, has_silu: bool,
    has_bias: bool,
):  # fmt: skip
    # A new prompt, a prompt that goes on, one token after two, none; states move from some blocks to others.
    batch = batch_of([9, 4, 1, 0], read=[-1, 1, 2, 9], write=[5, 1, 3, -1])
    x, weight = randn(14, channels, dtype=dtype), randn(conv_size, channels, dtype=dtype)
    bias = randn(channels, dtype=dtype) if has_bias else None
    given = guarded(states_of(conv_size, channels, dtype))
    caches = [given.tensor, given.tensor.clone(), given.tensor.clone()]
    views = [view_of(cache, conv_size, channels) for cache in caches]
    out = guarded(torch.zeros(14, channels, dtype=dtype))
    causal_conv(runtime, x, weight, bias, views[0], batch, has_silu=has_silu, out=out.tensor)
    expected = reference.causal_conv(x, weight, bias, views[1], batch, has_silu=has_silu)
    assert_close(out.tensor, expected, atol=TOLERANCE[dtype])
    assert same_bits(caches[0], caches[1])
    assert same_bits(
        out.tensor, causal_conv(portable, x, weight, bias, views[2], batch, has_silu=has_silu)
    ) and same_bits(caches[0], caches[2])
    out.assert_bands()
    given.assert_bands()


@each("dtype", TOLERANCE)
def test_prompts_give_the_same_bits_however_they_are_cut(runtime: NativeRuntime, dtype: torch.dtype):
    lengths, channels = [1, 20, 7, 3], 45
    x, weight = randn(sum(lengths), channels, dtype=dtype), randn(4, channels, dtype=dtype)
    states = randn(NUM_BLOCKS, 3, channels, dtype=dtype)
    whole = states.clone()
    expected = causal_conv(runtime, x, weight, None, whole, batch_of(lengths), has_silu=True)
    for chunk in (1, 2, 7):
        cut, out = states.clone(), torch.zeros_like(x)
        for batch, rows in chunks_of(lengths, chunk):
            out[rows] = causal_conv(runtime, x[rows], weight, None, cut, batch, has_silu=True)
        assert same_bits(out, expected) and same_bits(cut, whole)


def test_rows_may_be_strided(runtime: NativeRuntime):
    wide, weight, batch = randn(5, 64), randn(4, 40), batch_of([3, 2])
    states = [randn(NUM_BLOCKS, 3, 40) for _ in range(2)]
    results = [
        causal_conv(runtime, rows, weight, None, cache, batch, has_silu=True)
        for rows, cache in zip((wide[:, :40], wide[:, :40].clone()), states, strict=True)
    ]
    assert same_bits(*results) and same_bits(*states)


BATCH = batch_of([3, 2], read=[-1, 2])
WRONG_BATCHES = {
    "a block past the end": replace(BATCH, write_blocks=torch.tensor([1, NUM_BLOCKS], dtype=torch.int32)),
    "a state before the first": replace(BATCH, read_blocks=torch.tensor([1, -2], dtype=torch.int32)),
    "a block that two write": replace(BATCH, write_blocks=torch.tensor([2, 2], dtype=torch.int32)),
    "a block that another reads": replace(BATCH, write_blocks=torch.tensor([2, 3], dtype=torch.int32)),
    "rows of nobody": replace(BATCH, query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32)),
    "rows past the end": replace(BATCH, query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32)),
    "wide ids": replace(BATCH, read_blocks=BATCH.read_blocks.long()),
}


@each("batch", WRONG_BATCHES.values())
def test_batches_that_lead_astray_are_refused(runtime: NativeRuntime, batch: RecurrentBatch):
    states = randn(NUM_BLOCKS, 3, 8)
    before = states.clone()
    with pytest.raises(ShapeError):
        causal_conv(runtime, randn(5, 8), randn(4, 8), None, states, batch, has_silu=True)
    assert same_bits(states, before)


def test_impossible_tensors_are_refused(runtime: NativeRuntime):
    x, weight, states = randn(5, 8), randn(4, 8), randn(NUM_BLOCKS, 3, 8)
    for wrong in (
        {"weight": randn(9, 8)}, {"weight": randn(1, 8)}, {"weight": randn(8, 4).T}, {"bias": randn(7)}, {"out": x},
        {"states": randn(NUM_BLOCKS, 2, 8)}, {"states": states.bfloat16()}, {"states": states[:1].expand(6, 3, 8)},
        {"batch": None},
    ):  # fmt: skip
        given = {"x": x, "weight": weight, "bias": None, "states": states, "batch": BATCH, **wrong}
        with pytest.raises(ShapeError):
            causal_conv(runtime, **given, has_silu=True)
