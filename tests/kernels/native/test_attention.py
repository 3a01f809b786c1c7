"""Native paged attention against its reference, and the bits that must not depend on the company a query keeps.

Tolerances, for values below 4.5: bfloat16 rounds the weights of an average (2 * 2**-9 of the largest value at most)
and the result (2**-9), so 3 * 2**-9 * 4.5; float32 sums of up to 1200 terms in splits of 256, and exponents of scores
with an error of 2**-24 * 128, stay below 2e-5.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import (
    paged_attention,
    unpack_kv_cache,
)
from quire.kernels.native.runtime import NativeRuntime
from tests.each import each
from tests.kernels.native.guards import assert_close, randn, same_bits
from tests.kernels.native.paged import Shape, Step, make_step, pack_kv_cache

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCES = {BF16: 3 * 2**-9 * 4.5, F32: 2e-5}
# (query_len, seq_len) of each request: decodes and chunks around tiles of 16 and 32, splits of 256 and pages.
MIX = ((1, 1), (1, 17), (5, 5), (1, 300), (9, 290), (1, 32), (3, 4), (40, 70), (1, 513))
SHAPES = [
    Shape(),
    Shape(4, 4, 32, 16),
    Shape(7, 1, 40, 16),
    Shape(14, 2, 64, 32),
    Shape(3, 3, 80, 48),
    Shape(4, 2, 128, 16),
    Shape(2, 1, 34, 64),
    Shape(1, 1, 2, 32),
    Shape(40, 2, 256, 32),
    Shape(2, 1, 96, 32),
    Shape(2, 1, 112, 32),
    Shape(2, 2, 160, 16),
    Shape(3, 1, 192, 32),
    Shape(8, 1, 512, 32),
]
OPTIONS = {
    "plain": {},
    "window 1": {"sliding_window": 1},
    "window 7": {"sliding_window": 7},
    "window 300": {"sliding_window": 300},
    "chunks of 9": {"chunk": 9},
    "chunks of 290": {"chunk": 290},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": randn(4)},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "all of them": {"sliding_window": 40, "soft_cap": 3.0, "sinks": randn(4), "alibi_slopes": randn(4).abs() / 8},
}


@cache
def step_of(batch: tuple[tuple[int, int], ...], shape: Shape, option: str = "plain") -> Step:
    return make_step(batch, shape, **OPTIONS[option])


@cache
def expected_of(batch: tuple[tuple[int, int], ...], shape: Shape, option: str = "plain") -> torch.Tensor:
    return step_of(batch, shape, option).expected()


@cache
def portable_output(batch: tuple[tuple[int, int], ...], shape: Shape, option: str = "plain") -> torch.Tensor:
    return step_of(batch, shape, option).run(NativeRuntime("portable"))


def with_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    return Shape(shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, dtype)


@each("dtype", TOLERANCES)
@each("shape", SHAPES)
def test_every_head_layout_equals_the_reference_with_the_bits_of_every_tier(
    runtime: NativeRuntime, shape: Shape, dtype: torch.dtype
):
    shape = with_dtype(shape, dtype)
    output = step_of(MIX, shape).run(runtime)
    assert_close(output, expected_of(MIX, shape), atol=TOLERANCES[dtype])
    assert same_bits(output, portable_output(MIX, shape))


@each("dtype", TOLERANCES)
@each("option", OPTIONS)
def test_every_option_equals_the_reference_with_the_bits_of_every_tier(
    runtime: NativeRuntime, option: str, dtype: torch.dtype
):
    shape = Shape(dtype=dtype)
    output = step_of(MIX, shape, option).run(runtime)
    assert_close(output, expected_of(MIX, shape, option), atol=TOLERANCES[dtype])
    assert same_bits(output, portable_output(MIX, shape, option))


@each("batch", [(), ((0, 5),), ((1, 1), (0, 9), (2, 2))])
def test_requests_without_queries_cost_nothing(runtime: NativeRuntime, batch: tuple[tuple[int, int], ...]):
    step = step_of(batch, Shape())
    assert_close(step.run(runtime), step.expected(), atol=TOLERANCES[BF16])


@each("dtype", TOLERANCES)
@each("option", ["plain", "all of them"])
@each("chunk", [1, 7, 64])
def test_a_prompt_has_the_same_bits_in_any_chunks(runtime: NativeRuntime, chunk: int, option: str, dtype: torch.dtype):
    seq_len, shape = 276, Shape(4, 2, 32, 32, dtype)
    whole = portable_output(((seq_len, seq_len),), shape, option)
    step = step_of(((seq_len, seq_len),), shape, option)
    # Some chunks only: the first tokens, those around the end of the first split, the last.
    starts = [start for start in range(0, seq_len, chunk) if start < 20 or 240 < start + chunk < 276 or start > 270]
    cache = pack_kv_cache(step.key_cache, step.value_cache)
    for start in starts:
        end = min(seq_len, start + chunk)
        output = paged_attention(
            runtime, step.query[start:end], cache, step.block_table, torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32), 0.17, **step.options,
        )  # fmt: skip
        assert same_bits(output, whole[start:end])


@each("dtype", TOLERANCES)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(runtime: NativeRuntime, dtype: torch.dtype):
    shape = Shape(dtype=dtype)
    step, together = step_of(MIX, shape), portable_output(MIX, shape)
    cache, starts = pack_kv_cache(step.key_cache, step.value_cache), step.query_start_loc.tolist()
    for i, (query_len, _) in enumerate(MIX):
        output = paged_attention(
            runtime, step.query[starts[i] : starts[i + 1]], cache, step.block_table[i : i + 1],
            torch.tensor([0, query_len], dtype=torch.int32), step.seq_lens[i : i + 1], 0.17,
        )  # fmt: skip
        assert same_bits(output, together[starts[i] : starts[i + 1]])


@each("dtype", TOLERANCES)
@each("batch", [((1, 1300),), ((3, 1030), (1, 20))])
def test_a_context_shared_by_threads_has_the_same_bits(
    runtime: NativeRuntime, batch: tuple[tuple[int, int], ...], dtype: torch.dtype
):
    shape = Shape(3, 1, 32, 32, dtype)
    output = step_of(batch, shape).run(runtime)
    assert_close(output, expected_of(batch, shape), atol=TOLERANCES[dtype])
    assert same_bits(output, portable_output(batch, shape))


@each("dtype", TOLERANCES)
@each("option", ["plain", "all of them"])
def test_the_size_of_pages_changes_no_bit(runtime: NativeRuntime, option: str, dtype: torch.dtype):
    outputs = [make_step(MIX, Shape(4, 2, 32, size, dtype), **OPTIONS[option]).run(runtime) for size in (16, 48, 64)]
    expected = portable_output(MIX, Shape(4, 2, 32, 32, dtype), option)
    assert all(same_bits(output, expected) for output in outputs)


@each("dtype", TOLERANCES)
@each("option", ["plain", "all of them"])
@each("stale", [0.0, float("nan"), float("inf")])
def test_what_lies_in_unwritten_slots_changes_no_bit(
    runtime: NativeRuntime, stale: float, option: str, dtype: torch.dtype
):
    step = make_step(MIX, Shape(dtype=dtype), stale=stale, **OPTIONS[option])
    assert same_bits(step.run(runtime), portable_output(MIX, Shape(dtype=dtype), option))


@each("dtype", TOLERANCES)
def test_tokens_before_the_window_may_be_gone(runtime: NativeRuntime, dtype: torch.dtype):
    shape = Shape(dtype=dtype)
    step = make_step(((1, 300), (5, 290)), shape, sliding_window=40)
    expected = step.run(runtime)
    for request, oldest in enumerate((300 - 40, 290 - 5 + 1 - 40)):
        pages = step.block_table[request].tolist()
        step.block_table[request, : oldest // shape.block_size] = -1
        for pages_of in (step.key_cache, step.value_cache):
            pages_of[pages[oldest // shape.block_size], : oldest % shape.block_size] = float("nan")
    assert same_bits(step.run(runtime), expected)


def test_rows_past_the_last_request_come_back_as_zeros(runtime: NativeRuntime):
    step = make_step(((1, 5), (2, 40)), Shape())
    expected = step.run(runtime)
    step.query = torch.cat((step.query, torch.full((3, 4, 64), float("nan"), dtype=BF16)))
    output = step.run(runtime)
    assert same_bits(output[:3], expected) and bool((output[3:] == 0).all())


def test_queries_are_read_by_their_stride(runtime: NativeRuntime):
    step = make_step(((1, 5), (2, 40)), Shape())
    expected = step.run(runtime)
    wide = torch.full((3, 4 * 64 + 2 * 2 * 64), float("nan"), dtype=BF16)
    wide[:, : 4 * 64] = step.query.flatten(1)
    step.query = wide[:, : 4 * 64].unflatten(1, (4, 64))
    assert same_bits(step.run(runtime), expected)


@each("dtype", TOLERANCES)
def test_extreme_scores_do_not_overflow(runtime: NativeRuntime, dtype: torch.dtype):
    step = make_step(((1, 40), (4, 300)), Shape(dtype=dtype))
    step.query = step.query * 1e4
    # The largest score of a query is alone in its softmax, or nearly so: an error of its rounding, in float32.
    assert_close(step.run(runtime), step.expected(), atol=5e-2)


@each("dtype", TOLERANCES)
def test_packing_is_undone_by_unpacking(dtype: torch.dtype):
    keys, values = randn(5, 48, 3, 10, dtype=dtype), randn(5, 48, 3, 10, dtype=dtype, seed=1)
    unpacked = unpack_kv_cache(pack_kv_cache(keys, values), 10)
    assert same_bits(unpacked[0], keys) and same_bits(unpacked[1], values)


def test_indices_out_of_the_cache_are_refused(runtime: NativeRuntime):
    step = make_step(((1, 40), (2, 70)), Shape())
    tables = [step.block_table.clone() for _ in range(2)]
    tables[0][1, 2], tables[1][0, 1] = len(step.key_cache), -1
    for table in tables:
        with pytest.raises(ShapeError, match="block_table names a page"):
            paged_attention(runtime, step.query, pack(step), table, step.query_start_loc, step.seq_lens, 1.0)
    for lens, match in (([40, 1], "fewer tokens than queries"), ([40, 1000], "more pages than block_table")):
        with pytest.raises(ShapeError, match=match):
            seq_lens = torch.tensor(lens, dtype=torch.int32)
            paged_attention(runtime, step.query, pack(step), step.block_table, step.query_start_loc, seq_lens, 1.0)
    for starts in ([1, 2, 3], [0, 2, 1], [0, 1, 9]):
        with pytest.raises(ShapeError, match="query_start_loc"):
            loc = torch.tensor(starts, dtype=torch.int32)
            paged_attention(runtime, step.query, pack(step), step.block_table, loc, step.seq_lens, 1.0)


def pack(step: Step) -> torch.Tensor:
    return pack_kv_cache(step.key_cache, step.value_cache)


@each(
    "change",
    [
        {"query": randn(3, 3, 64, dtype=BF16)},
        {"query": randn(3, 0, 64, dtype=BF16)},
        {"query": randn(3, 4, 64)},
        {"query": randn(3, 4, 63, dtype=BF16)},
        {"query": randn(3, 4, 128, dtype=BF16)[..., ::2]},
        {"query": randn(3, 256, dtype=BF16)},
        {"kv_cache": randn(5, 2, 2, 64 * 8, dtype=BF16)},
        {"kv_cache": randn(5, 2, 64 * 64, dtype=BF16)},
        {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
        {"seq_lens": torch.ones(3, dtype=torch.int32)},
        {"query_start_loc": torch.ones(2, dtype=torch.int32)},
        {"sinks": randn(3)},
        {"alibi_slopes": randn(4, dtype=BF16)},
        {"out": randn(3, 4, 64)},
        {"sliding_window": 0},
        {"chunk": 0},
    ],
)
def test_impossible_tensors_are_refused(runtime: NativeRuntime, change: dict[str, torch.Tensor]):
    step = step_of(((1, 40), (2, 70)), Shape())
    given = {
        "query": step.query,
        "kv_cache": pack(step),
        "block_table": step.block_table,
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
    }
    with pytest.raises(ShapeError):
        paged_attention(runtime, scale=1.0, **{**given, **change})
