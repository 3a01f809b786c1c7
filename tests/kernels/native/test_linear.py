"""Products with packed weights: equal to the reference in order, whatever the tier, the threads and the batch."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.elementwise import silu_and_mul
from quire.kernels.native.linear import gated_linear, gather_rows, linear, pack_rows, packed_shape, unpack_rows
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import activation as reference_activation
from quire.kernels.reference import linear as reference
from tests.each import each
from tests.kernels.native.guards import Guarded, assert_close, guarded, randn, same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Around a panel of 16 outputs, tiles of 32 inputs, blocks of 7 and 8 tiles, groups of 4 panels.
SIZES = [(1, 1), (16, 32), (17, 33), (61, 257), (130, 450)]
# Around the register blocks (6, 12 rows), the tiles (16), pairs of them, and twice those.
ROWS = [0, 1, 2, 5, 7, 12, 13, 16, 17, 33, 65]
BATCHES = [1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 100]


def packed(runtime: NativeRuntime, weight: torch.Tensor) -> torch.Tensor:
    """`weight` packed into memory of exactly its size."""
    result = torch.zeros(packed_shape(*weight.shape, weight.dtype), dtype=weight.dtype)
    assert pack_rows(runtime, weight, result, 0)
    return result


@each("dtype", [BF16, F32])
@each("output_size, input_size", SIZES)
def test_every_output_has_the_bits_of_the_reference_in_order(
    runtime: NativeRuntime, output_size: int, input_size: int, dtype: torch.dtype
):
    weight, x = randn(output_size, input_size, dtype=dtype, seed=1), randn(max(ROWS), input_size, dtype=dtype)
    expected = reference.linear_in_order(x, weight)
    packed_weight, given = packed(runtime, weight), guarded(x)
    for num_rows in ROWS:
        out = Guarded(num_rows, output_size, dtype=F32)
        actual = linear(runtime, given.tensor[:num_rows], packed_weight, output_size, out_dtype=F32, out=out.tensor)
        assert same_bits(actual, expected[:num_rows]), f"{num_rows} rows"
        out.assert_bands()
        if dtype == BF16:
            rounded = Guarded(num_rows, output_size, dtype=BF16)
            linear(runtime, given.tensor[:num_rows], packed_weight, output_size, out=rounded.tensor)
            assert same_bits(rounded.tensor, expected[:num_rows].to(BF16)), f"{num_rows} rows"
            rounded.assert_bands()
    assert same_bits(given.tensor, x)


@each("dtype", [BF16, F32])
def test_sums_are_close_to_those_in_double_precision(runtime: NativeRuntime, dtype: torch.dtype):
    # At most 1000 roundings to 2 ** -24 of sums of 1000 products, each of the size of 1: standard deviation 32.
    weight, x = randn(48, 1000, dtype=dtype, seed=1), randn(20, 1000, dtype=dtype)
    actual = linear(runtime, x, packed(runtime, weight), 48, out_dtype=F32)
    assert_close(actual, reference.linear(x, weight), atol=1000 * 2**-24 * 32)


@each("dtype", [BF16, F32])
def test_a_row_does_not_depend_on_its_batch(runtime: NativeRuntime, dtype: torch.dtype):
    weight, x = randn(200, 300, dtype=dtype), randn(max(BATCHES), 300, dtype=dtype, seed=1)
    packed_weight = packed(runtime, weight)
    alone = torch.cat([linear(runtime, x[i : i + 1], packed_weight, 200, out_dtype=F32) for i in range(len(x))])
    for num_rows in BATCHES:
        assert same_bits(linear(runtime, x[:num_rows], packed_weight, 200, out_dtype=F32), alone[:num_rows])
        assert same_bits(linear(runtime, x[-num_rows:], packed_weight, 200, out_dtype=F32), alone[-num_rows:])


@each("num_rows, input_size", [(300, 96), (531, 96), (261, 700)])
def test_rows_beyond_a_task_have_the_same_bits(
    runtime: NativeRuntime, portable: NativeRuntime, num_rows: int, input_size: int
):
    weight, x = randn(80, input_size, dtype=BF16), randn(num_rows, input_size, dtype=BF16, seed=1)
    packed_weight = packed(portable, weight)
    assert same_bits(linear(runtime, x, packed_weight, 80), linear(portable, x, packed_weight, 80))


@each("output_size", [1056, 1060])
def test_outputs_larger_than_the_caches_have_the_same_bits(runtime: NativeRuntime, output_size: int):
    weight, x = randn(output_size, 4, dtype=BF16), randn(1024, 4, dtype=BF16, seed=1)
    out = Guarded(1024, output_size, dtype=F32)
    linear(runtime, x, packed(runtime, weight), output_size, out_dtype=F32, out=out.tensor)
    out.assert_bands()
    assert same_bits(out.tensor, reference.linear_in_order(x, weight))


@each("num_rows", [1, 20])
@each("dtype, bias_dtype", [(BF16, BF16), (BF16, F32), (F32, F32)])
def test_a_bias_is_added_in_float32_before_rounding(
    runtime: NativeRuntime, dtype: torch.dtype, bias_dtype: torch.dtype, num_rows: int
):
    weight, x = randn(37, 70, dtype=dtype), randn(num_rows, 70, dtype=dtype, seed=1)
    bias = guarded(randn(37, dtype=bias_dtype, seed=2))
    actual = linear(runtime, x, packed(runtime, weight), 37, bias.tensor)
    assert same_bits(actual, reference.linear_in_order(x, weight, bias.tensor).to(dtype))


@each("num_rows", [1, 40])
def test_rows_of_wider_matrices_are_read_and_written_by_their_stride(runtime: NativeRuntime, num_rows: int):
    weight, x = randn(33, 50, dtype=BF16), randn(num_rows, 64, dtype=BF16, seed=1)
    packed_weight, wide = packed(runtime, weight), torch.full((num_rows, 48), 7.0, dtype=BF16)
    expected = linear(runtime, x[:, 5:55].contiguous(), packed_weight, 33)
    linear(runtime, x[:, 5:55], packed_weight, 33, out=wide[:, 3:36])
    assert same_bits(wide[:, 3:36], expected)
    assert bool((wide[:, :3] == 7).all()) and bool((wide[:, 36:] == 7).all())


def test_nan_and_infinity_reach_the_outputs_of_their_row_alone(runtime: NativeRuntime):
    weight, x = randn(20, 40, dtype=BF16), randn(18, 40, dtype=BF16, seed=1)
    x[3, 7], x[17, 0] = float("nan"), float("inf")
    actual = linear(runtime, x, packed(runtime, weight), 20)
    assert bool(actual[3].isnan().all()) and bool(actual[17].isinf().all())
    others = [row for row in range(18) if row not in (3, 17)]
    assert bool(actual[others].isfinite().all())


@each("dtype", [BF16, F32])
@each("num_rows", [0, 1, 9, 16, 35])
@each("with_bias", [False, True])
def test_gated_products_have_the_bits_of_the_product_then_the_activation(
    runtime: NativeRuntime, portable: NativeRuntime, num_rows: int, dtype: torch.dtype, with_bias: bool
):
    size = 48
    weight, x = randn(2 * size, 90, dtype=dtype), randn(num_rows, 90, dtype=dtype, seed=1)
    bias = randn(2 * size, dtype=dtype, seed=2) if with_bias else None
    packed_weight, out = packed(runtime, weight), Guarded(num_rows, size, dtype=dtype)
    gated_linear(runtime, x, packed_weight, size, bias, out=out.tensor)
    out.assert_bands()
    assert same_bits(out.tensor, gated_linear(portable, x, packed_weight, size, bias))
    product = linear(runtime, x, packed_weight, 2 * size, bias)
    assert same_bits(out.tensor, silu_and_mul(runtime, product))
    # e ** x within 2 units in the last place; silu and the result are each rounded to the dtype.
    expected = reference_activation.silu_and_mul(product.float())
    assert_close(out.tensor, expected, atol=1e-6, rtol=2 * 2**-8 if dtype == BF16 else 1e-6)


@each("row_dtype", [BF16, F16, F32])
@each("dtype", [BF16, F32])
@each("input_size", [1, 31, 33, 70])
def test_packed_rows_come_back_rounded_once(
    runtime: NativeRuntime, row_dtype: torch.dtype, dtype: torch.dtype, input_size: int
):
    # Matrices of 5, 20 and 9 rows follow each other; the second is a slice of wider rows.
    parts = [randn(5, input_size), randn(20, input_size + 3, seed=1)[:, 2:-1], randn(9, input_size, seed=2) * 1e-6]
    parts = [part.to(row_dtype) for part in parts]
    out = guarded(torch.zeros(packed_shape(34, input_size, dtype), dtype=dtype))
    first_row = 0
    for part in parts:
        assert pack_rows(runtime, part, out.tensor, first_row)
        first_row += len(part)
    out.assert_bands()
    assert same_bits(unpack_rows(runtime, out.tensor, input_size, 0, 34), torch.cat(parts).to(dtype))
    assert same_bits(unpack_rows(runtime, out.tensor, input_size, 4, 3), torch.cat(parts).to(dtype)[4:7])
    padding = unpack_rows(runtime, out.tensor, input_size, 34, 14)
    assert bool((padding == 0).all())
    assert int(torch.count_nonzero(out.tensor)) == int(torch.count_nonzero(torch.cat(parts).to(dtype)))


def test_the_place_of_every_weight_is_as_documented(runtime: NativeRuntime):
    weight = randn(40, 70)
    as_bf16, as_f32 = packed(runtime, weight.to(BF16)), packed(runtime, weight)
    for output, k in [(0, 0), (17, 33), (39, 69), (16, 64)]:
        panel, tile, pair = output // 16, k // 32, k % 32 // 2
        assert as_bf16[panel, tile, pair, output % 16, k % 2] == weight.to(BF16)[output, k]
        assert as_f32[panel, tile, pair, k % 2, output % 16] == weight[output, k]


@each("bad", [float("nan"), float("inf"), float("-inf")])
@each("dtype", [BF16, F16, F32])
def test_packing_reports_values_that_are_not_finite(runtime: NativeRuntime, dtype: torch.dtype, bad: float):
    weight = randn(30, 40, dtype=dtype)
    weight[29, 39] = bad
    for to in (BF16, F32):
        out = torch.zeros(packed_shape(30, 40, to), dtype=to)
        assert not pack_rows(runtime, weight, out, 0)
        assert pack_rows(runtime, weight[:29], out, 0)


def test_half_precision_converts_as_torch_does_for_every_number(runtime: NativeRuntime):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(F16)
    every = every[every.isfinite()].reshape(-1, 64)
    for to in (BF16, F32):
        out = torch.zeros(packed_shape(len(every), 64, to), dtype=to)
        assert pack_rows(runtime, every, out, 0)
        assert same_bits(unpack_rows(runtime, out, 64, 0, len(every)), every.to(to))


@each("ids_dtype", [torch.int32, torch.int64])
@each("dtype", [BF16, F32])
def test_gathered_rows_are_those_of_the_weight(runtime: NativeRuntime, dtype: torch.dtype, ids_dtype: torch.dtype):
    weight = randn(50, 45, dtype=dtype)
    packed_weight = packed(runtime, weight)
    for ids in ([], [0], [49, 3, 3, 17, 0, 31]):
        actual = gather_rows(runtime, torch.tensor(ids, dtype=ids_dtype), packed_weight, 45)
        assert same_bits(actual, weight[torch.tensor(ids, dtype=torch.int64)])


@each("bad", [-1, 64, 2**40])
def test_ids_outside_the_weight_are_refused(runtime: NativeRuntime, bad: int):
    packed_weight = packed(runtime, randn(50, 45))
    with pytest.raises(ShapeError, match=str(bad)):
        gather_rows(runtime, torch.tensor([3, bad]), packed_weight, 45)


def test_impossible_tensors_are_refused(runtime: NativeRuntime):
    weight, x = randn(20, 40, dtype=BF16), randn(3, 40, dtype=BF16)
    packed_weight = packed(runtime, weight)
    refused = [
        lambda: linear(runtime, x[:, :30], packed_weight, 20),
        lambda: linear(runtime, x.float(), packed_weight, 20),
        lambda: linear(runtime, x.T.contiguous().T, packed_weight, 20),
        lambda: linear(runtime, x, packed_weight, 33),
        lambda: linear(runtime, x[:, :0], packed_weight, 20),
        lambda: linear(runtime, x, packed_weight, 20, randn(19)),
        lambda: linear(runtime, x, packed_weight, 20, randn(20, dtype=F16)),
        lambda: linear(runtime, x, packed_weight, 20, out_dtype=F16),
        lambda: linear(runtime, x, packed_weight, 20, out=torch.empty(3, 20)),
        lambda: linear(runtime, x, packed_weight, 20, out=torch.empty(4, 20, dtype=BF16)),
        lambda: gated_linear(runtime, x, packed_weight, 10),
        lambda: gated_linear(runtime, x, packed_weight, 16, activation="gelu"),
        lambda: pack_rows(runtime, weight, packed_weight, 13),
        lambda: pack_rows(runtime, weight, packed_weight, -1),
        lambda: pack_rows(runtime, weight[:, :30], packed_weight, 0),
        lambda: unpack_rows(runtime, packed_weight, 40, 30, 3),
        lambda: packed_shape(20, 40, F16),
    ]
    for call in refused:
        with pytest.raises(ShapeError):
            call()
