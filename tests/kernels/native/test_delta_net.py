"""The gated delta rule against its reference: the same bits from every tier, however prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.delta_net import delta_gates, gated_delta_rule
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference import delta_net as reference
from tests.each import each
from tests.kernels.native.guards import assert_close, guarded, randn, same_bits
from tests.kernels.native.recurrent_steps import batch_of, chunks_of

# Results are sums of values of a few units; those in bfloat16 are rounded once.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 3e-6}
NUM_BLOCKS = 6
GAP = 5  # floats of other layers behind each state


class Heads:
    """Inputs of the rule, with states between which other numbers lie."""

    def __init__(
        self, num_tokens: int, key_heads: int, value_heads: int, key_size: int, value_size: int, dtype: torch.dtype
    ) -> None:
        self.key_heads, self.shape = key_heads, (value_heads, key_size, value_size)
        self.qkv = randn(num_tokens, 2 * key_heads * key_size + value_heads * value_size, dtype=dtype)
        self.decay, self.beta = (randn(num_tokens, value_heads, seed=seed).sigmoid() for seed in (1, 2))
        self.cache = randn(NUM_BLOCKS, value_heads * key_size * value_size + GAP, seed=3)

    def run(
        self, rule: Any, cache: torch.Tensor, batch: RecurrentBatch, rows: list[int] | slice = slice(None), **out: Any
    ) -> torch.Tensor:
        states = cache[:, :-GAP].view(NUM_BLOCKS, *self.shape)
        gates = self.decay[rows].contiguous(), self.beta[rows].contiguous()
        return rule(self.qkv[rows], *gates, states, batch, num_key_heads=self.key_heads, scale=0.3, **out)


def rule_of(runtime: NativeRuntime) -> Any:
    return lambda *args, **options: gated_delta_rule(runtime, *args, **options)


SHAPES = [(1, 1, 1, 16), (2, 4, 8, 16), (1, 3, 33, 48), (2, 2, 16, 80), (1, 2, 128, 128)]


@each("dtype", TOLERANCE)
@each("shape", SHAPES)
def test_it_equals_its_reference(
    runtime: NativeRuntime, portable: NativeRuntime, shape: tuple[int, int, int, int], dtype: torch.dtype
):
    # A new prompt, a prompt that goes on, one token after two, none; states move from some blocks to others.
    batch = batch_of([9, 4, 1, 0], read=[-1, 1, 2, 0], write=[5, 1, 3, 0])
    heads = Heads(14, *shape, dtype)
    given, out = guarded(heads.cache), guarded(torch.zeros(14, shape[1] * shape[3], dtype=dtype))
    heads.run(rule_of(runtime), given.tensor, batch, out=out.tensor)
    plain = heads.cache.clone()
    expected = heads.run(reference.gated_delta_rule, plain, batch)
    assert_close(out.tensor, expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert_close(given.tensor, plain, atol=5e-6, rtol=1e-6)
    assert same_bits(given.tensor[:, -GAP:], heads.cache[:, -GAP:])
    assert same_bits(given.tensor[[0, 2, 4]], heads.cache[[0, 2, 4]])
    plain = heads.cache.clone()
    assert same_bits(out.tensor, heads.run(rule_of(portable), plain, batch)) and same_bits(given.tensor, plain)
    out.assert_bands()
    given.assert_bands()


@each("dtype", TOLERANCE)
def test_prompts_give_the_same_bits_however_they_are_cut(runtime: NativeRuntime, dtype: torch.dtype):
    lengths = [1, 20, 7, 3]
    heads = Heads(sum(lengths), 2, 4, 20, 80, dtype)
    whole = heads.cache.clone()
    expected = heads.run(rule_of(runtime), whole, batch_of(lengths))
    for chunk in (1, 2, 7):
        cut, out = heads.cache.clone(), torch.zeros_like(expected)
        for batch, rows in chunks_of(lengths, chunk):
            out[rows] = heads.run(rule_of(runtime), cut, batch, rows)
        assert same_bits(out, expected) and same_bits(cut, whole)


def test_a_key_that_comes_again_gives_the_value_it_came_with(runtime: NativeRuntime):
    """With nothing forgotten and the whole change made, the state maps orthogonal keys to their newest values."""
    keys = torch.eye(4)[[0, 1, 2, 1, 3]]
    values = randn(5, 16)
    queries = torch.eye(4)[[0, 0, 1, 1, 0]]
    ones, states = torch.ones(5, 1), torch.zeros(1, 1, 4, 16)
    out = gated_delta_rule(
        runtime, torch.cat((queries, keys, values), 1), ones, ones, states, batch_of([5], write=[0]), num_key_heads=1,
        scale=1.0,
    )  # fmt: skip
    assert_close(out, values[[0, 0, 1, 3, 0]], atol=1e-5)


def test_rows_may_be_strided(runtime: NativeRuntime):
    batch, heads = batch_of([5, 3], read=[-1, 2]), Heads(8, 1, 2, 16, 32, torch.bfloat16)
    expected = heads.run(rule_of(runtime), heads.cache.clone(), batch)
    heads.qkv = torch.cat((heads.qkv, heads.qkv), 1)[:, : heads.qkv.shape[1]]
    assert same_bits(expected, heads.run(rule_of(runtime), heads.cache.clone(), batch))


@each("dtype", TOLERANCE)
@each("num_heads", [1, 16, 37])
def test_gates_equal_their_reference(
    runtime: NativeRuntime, portable: NativeRuntime, num_heads: int, dtype: torch.dtype
):
    wide = (randn(40, 2 * num_heads) * 6).to(dtype)
    inputs = wide.split(num_heads, dim=1)
    heads = randn(num_heads), randn(num_heads, seed=1) * 3
    actual, expected = delta_gates(runtime, *inputs, *heads), reference.delta_gates(*inputs, *heads)
    for gates, wanted in zip(actual, expected, strict=True):
        assert_close(gates, wanted, atol=1e-6)
    for one, other in zip(actual, delta_gates(portable, *inputs, *heads), strict=True):
        assert same_bits(one, other)


WRONG = {
    "another number of values": {"qkv": randn(5, 2 * 16 + 63)},
    "another number of tokens": {"decay": torch.ones(4, 2)},
    "gates in another dtype": {"beta": torch.ones(5, 2, dtype=torch.bfloat16)},
    "key heads that do not divide": {"num_key_heads": 3},
    "values of no whole vector": {"states": torch.zeros(NUM_BLOCKS, 2, 16, 8)},
    "states in another dtype": {"states": torch.zeros(NUM_BLOCKS, 2, 16, 32, dtype=torch.bfloat16)},
    "a block that two write": {"batch": batch_of([3, 2], write=[2, 2])},
    "a block past the end": {"batch": batch_of([3, 2], read=[-1, NUM_BLOCKS])},
}


@each("wrong", WRONG.values())
def test_impossible_calls_are_refused(runtime: NativeRuntime, wrong: dict[str, Any]):
    states = torch.zeros(NUM_BLOCKS, 2, 16, 32)
    right = {
        "qkv": randn(5, 2 * 16 + 64), "decay": torch.ones(5, 2), "beta": torch.ones(5, 2), "states": states,
        "batch": batch_of([3, 2]), "num_key_heads": 1, "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(ShapeError):
        gated_delta_rule(runtime, **{**right, **wrong})
    assert not states.any()
    with pytest.raises(ShapeError, match="shares memory"):
        gated_delta_rule(runtime, **right, out=right["qkv"].view(-1)[:320].view(5, 64))
