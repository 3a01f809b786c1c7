"""Spans of a few tokens, as a step that verifies drafts computes them: the bits of tokens computed one at a time.

Attention over spans that begin anywhere in a page and in a split of the context, and products of as many rows, on
every tier. Spans in recurrent layers are in the tests of their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import coded, quant
from quire.kernels.native.attention import paged_attention
from quire.kernels.native.block_quant import BLOCK_KERNELS
from quire.kernels.native.causal_conv import causal_conv
from quire.kernels.native.delta_net import gated_delta_rule
from quire.kernels.native.latent import latent_attention
from quire.kernels.native.linear import linear
from quire.kernels.native.runtime import NativeRuntime
from tests.each import each
from tests.kernels.native import (
    recurrent_steps,
    test_block_quant,
    test_coded,
    test_delta_net,
    test_latent,
    test_linear,
    test_quant,
    test_state_space,
)
from tests.kernels.native.guards import guarded, randn, same_bits
from tests.kernels.native.paged import Shape, make_step
from tests.kernels.native.test_attention import OPTIONS, pack
from tests.kernels.native.test_attention_fp8 import pack_codes

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MOST = 17
# Within the first page; across pages of 16 and 32; across tiles; at the end of a split of 256 and within the next.
STARTS = (0, 3, 15, 27, 48, 239, 250, 255, 256, 271)
LAST = max(STARTS) + MOST
Attend = Callable[[NativeRuntime, torch.Tensor, Sequence[tuple[int, int]]], torch.Tensor]


def batch_of(spans: Sequence[tuple[int, int]], table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Requests that all have one sequence; each computes so many tokens from a position on."""
    sizes = torch.tensor([0, *(size for _, size in spans)])
    return {
        "block_table": table.expand(len(spans), -1).contiguous(),
        "query_start_loc": sizes.cumsum(0).int(),
        "seq_lens": torch.tensor([start + size for start, size in spans], dtype=torch.int32),
    }


@cache
def attention(dtype: torch.dtype, option: str, block_size: int) -> tuple[torch.Tensor, Attend]:
    """The queries of a sequence, and attention for some of them."""
    shape = Shape(4, 2, 32, block_size, F32 if dtype == F32 else BF16)
    step = make_step(((LAST, LAST),), shape, **OPTIONS[option])
    if dtype == FP8:
        codes = [part.nan_to_num(0.0).to(FP8).view(torch.uint8) for part in (step.key_cache, step.value_cache)]
        pages = pack_codes(codes[0], codes[1], FP8)
    else:
        pages = pack(step)

    def attend(runtime: NativeRuntime, query: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        return paged_attention(
            runtime, query, pages, **batch_of(spans, step.block_table), scale=0.17, **step.options
        )  # fmt: skip

    return step.query, attend


@cache
def latents(dtype: torch.dtype, block_size: int) -> tuple[torch.Tensor, Attend]:
    shape = test_latent.Shape(block_size=block_size, dtype=dtype)
    step = test_latent.make_step(((LAST, LAST),), shape)

    def attend(runtime: NativeRuntime, query: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        batch = batch_of(spans, step.block_table)
        return latent_attention(runtime, query, step.latents, shape.latent_size, **batch, scale=0.17)

    return step.query, attend


def check_spans(runtime: NativeRuntime, query: torch.Tensor, attend: Attend) -> None:
    """Spans alone and side by side give what one token at a time does."""
    positions = sorted({start + i for start in STARTS for i in range(MOST)})
    one_by_one = torch.zeros(LAST, *attend(runtime, query[:1], [(0, 1)]).shape[1:], dtype=query.dtype)
    for position in positions:
        one_by_one[position] = attend(runtime, query[position : position + 1], [(position, 1)])[0]
    for start in STARTS:
        sizes = range(1, MOST + 1)
        together = attend(
            runtime, torch.cat([query[start : start + size] for size in sizes]), [(start, size) for size in sizes]
        )
        assert same_bits(together, torch.cat([one_by_one[start : start + size] for size in sizes])), start
        for size in (2, 5, 8, 9, MOST):
            alone = attend(runtime, query[start : start + size], [(start, size)])
            assert same_bits(alone, one_by_one[start : start + size]), (start, size)


@each("dtype", [BF16, F32, FP8])
@each("option", OPTIONS)
def test_attention_of_a_span_is_that_of_its_tokens_one_at_a_time(
    runtime: NativeRuntime, option: str, dtype: torch.dtype
):
    check_spans(runtime, *attention(dtype, option, 32 if option != "plain" else 16))


@each("dtype", [BF16, F32])
def test_latent_attention_of_a_span_is_that_of_its_tokens_one_at_a_time(runtime: NativeRuntime, dtype: torch.dtype):
    check_spans(runtime, *latents(dtype, 32))


def check_rows(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    alone = torch.cat([product(x[i : i + 1]) for i in range(MOST)])
    for size in range(2, MOST + 1):
        assert same_bits(product(x[:size]), alone[:size]), f"{size} rows"
        assert same_bits(product(x[-size:]), alone[-size:]), f"{size} rows"


@each("dtype", [BF16, F32])
@each("size", [(200, 300), (70, 1056)])
def test_a_product_of_a_span_is_that_of_its_rows_one_at_a_time(
    runtime: NativeRuntime, size: tuple[int, int], dtype: torch.dtype
):
    weight = test_linear.packed(runtime, randn(*size, dtype=dtype))
    x = randn(MOST, size[1], dtype=dtype, seed=1)
    check_rows(x, lambda rows: linear(runtime, rows, weight, size[0], out_dtype=F32))


@each("format", [quant.INT8, quant.INT4])
@each("size", [(131, 320), (80, 1024)])
def test_a_quantised_product_of_a_span_is_that_of_its_rows_one_at_a_time(
    runtime: NativeRuntime, size: tuple[int, int], format: quant.QuantFormat
):
    weight = test_quant.pack(runtime, format, randn(*size, dtype=BF16))
    check_rows(randn(MOST, size[1], dtype=BF16, seed=1), lambda rows: weight.linear(runtime, rows, out_dtype=F32))


@each("kernel", BLOCK_KERNELS.values())
def test_a_product_in_blocks_of_a_span_is_that_of_its_rows_one_at_a_time(runtime: NativeRuntime, kernel: Any):
    weight = test_block_quant.random_weight(runtime, kernel)
    x = randn(MOST, test_block_quant.inputs_of(kernel), dtype=BF16)
    check_rows(x, lambda rows: weight.linear(runtime, rows, out_dtype=F32))


@test_coded.codes
def test_a_coded_product_of_a_span_is_that_of_its_rows_one_at_a_time(runtime: NativeRuntime, code: coded.Code):
    weight = test_coded.pack(runtime, test_coded.make_rows(code, 80, 320, 64))
    x = randn(MOST, 320, dtype=BF16, seed=1)
    check_rows(x, lambda rows: coded.linear(runtime, rows, weight, 80, out_dtype=F32))


Rule = Callable[[torch.Tensor, Any, "list[int] | slice"], torch.Tensor]
SPANS = [5, 1, 4]
"""Tokens of three requests, of which the first two have states and the third begins anew."""
WRITTEN, KEPT = [1, 2, 3], [[7, 8, -1, 9], [], [10, 11, -1]]
"""The block of each request, and those for the states after its tokens but the last."""


def convolution(runtime: NativeRuntime, dtype: torch.dtype) -> tuple[torch.Tensor, Rule]:
    x, weight = randn(sum(SPANS), 45, dtype=dtype), randn(4, 45, dtype=dtype)
    states = randn(12, 3, 45, dtype=dtype)
    return states, lambda states, batch, rows: causal_conv(runtime, x[rows], weight, None, states, batch, has_silu=True)


def delta_rule(runtime: NativeRuntime, dtype: torch.dtype) -> tuple[torch.Tensor, Rule]:
    heads = test_delta_net.Heads(sum(SPANS), 2, 4, 20, 80, dtype)

    def rule(states: torch.Tensor, batch: Any, rows: Any) -> torch.Tensor:
        gates = heads.decay[rows].contiguous(), heads.beta[rows].contiguous()
        return gated_delta_rule(runtime, heads.qkv[rows], *gates, states, batch, num_key_heads=2, scale=0.3)

    return randn(12, *heads.shape), rule


def scan(kind: Any, size: int) -> Callable[[NativeRuntime, torch.dtype], tuple[torch.Tensor, Rule]]:
    def make(runtime: NativeRuntime, dtype: torch.dtype) -> tuple[torch.Tensor, Rule]:
        inputs = kind(sum(SPANS), size, 9, dtype)
        cache = torch.cat((inputs.packed(), inputs.packed()))
        inputs.states = torch.cat((inputs.states, inputs.states))
        return cache, lambda states, batch, rows: inputs.run(runtime, states, batch, rows)

    return make


RECURRENT = {
    "convolution": convolution,
    "delta rule": delta_rule,
    "mamba": scan(test_state_space.Mamba, 40),
    "mamba 2": scan(test_state_space.Mamba2, 50),
}


@each("dtype", [BF16, F32])
@each("make", RECURRENT.values())
def test_states_kept_in_a_span_are_those_of_its_tokens_one_at_a_time(
    runtime: NativeRuntime, make: Callable[..., tuple[torch.Tensor, Rule]], dtype: torch.dtype
):
    states, rule = make(runtime, dtype)
    one_by_one, outputs = states.clone(), []
    expected = states.clone()
    for i, size in enumerate(SPANS):
        for j in range(size):
            first = sum(SPANS[:i]) + j
            read = [-1 if i == 2 and j == 0 else WRITTEN[i]]
            batch = recurrent_steps.batch_of([1], read=read, write=[WRITTEN[i]])
            outputs.append(rule(one_by_one, batch, [first]))
            block = WRITTEN[i] if j == size - 1 else KEPT[i][j]
            if block >= 0:
                expected[block] = one_by_one[WRITTEN[i]]
    kept = torch.tensor([block for blocks in KEPT for block in (*blocks, -1)], dtype=torch.int32)
    batch = recurrent_steps.batch_of(SPANS, read=[1, 2, -1], write=WRITTEN)
    given = guarded(states)
    together = rule(given.tensor, replace(batch, token_blocks=kept), slice(None))
    assert same_bits(together, torch.cat(outputs)) and same_bits(given.tensor, expected)
    given.assert_bands()
    elsewhere = replace(batch, read_blocks=torch.tensor([4, 5, -1], dtype=torch.int32), token_blocks=kept)
    moved = states.clone()
    moved[[4, 5]] = states[[1, 2]]
    assert same_bits(rule(moved, elsewhere, slice(None)), together)
    assert all(same_bits(moved[block], expected[block]) for block in (*WRITTEN, *kept.tolist()) if block >= 0)


@each("place, block", [(0, 12), (0, -2), (0, 1), (0, 2), (0, 4), (0, 8), (4, 6)])  # fmt: skip
@each("make", RECURRENT.values())
def test_blocks_for_states_after_tokens_that_lead_astray_are_refused(
    runtime: NativeRuntime, make: Callable[..., tuple[torch.Tensor, Rule]], place: int, block: int
):
    states, rule = make(runtime, F32)
    before = states.clone()
    kept = torch.tensor([7, 8, 9, 10, -1, -1, -1, -1, -1, -1], dtype=torch.int32)
    kept[place] = block
    batch = recurrent_steps.batch_of(SPANS, read=[1, 4, -1], write=WRITTEN)
    for wrong in (kept, kept[:-1], kept.long()):
        with pytest.raises(ShapeError):
            rule(states, replace(batch, token_blocks=wrong), slice(None))
    assert same_bits(states, before)
