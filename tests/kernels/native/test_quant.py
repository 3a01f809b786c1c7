"""Quantised linear layers against their references: integers are exact, so every comparison is bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import quant
from quire.kernels.native.checks import DTYPE_CODES
from quire.kernels.native.elementwise import silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import quant as reference
from quire.models.weights import relative_error
from tests.each import each
from tests.kernels.native.guards import Guarded, guarded, randn, same_bits

BF16, F32 = torch.bfloat16, torch.float32
# (outputs, inputs): around panels of 16 and 64, tiles of 32, 64 and 128, and blocks of 256 inputs.
SIZES = [(1, 1), (15, 31), (16, 64), (17, 65), (67, 257), (131, 320), (64, 416), (80, 640)]
ROWS = [0, 1, 2, 5, 7, 16, 17, 50]


@dataclass
class Weight:
    """One matrix, packed by a runtime, and what it means."""

    format: quant.QuantFormat
    packed: torch.Tensor
    scales: torch.Tensor
    all_finite: bool
    output_size: int
    input_size: int

    @property
    def group_size(self) -> int:
        return self.format.group_size(self.input_size)

    def group_scales(self) -> torch.Tensor:
        """[output_size, num_groups] float32."""
        return self.scales.float().transpose(1, 2).flatten(0, 1)[: self.output_size].contiguous()

    def unpacked(self, runtime: NativeRuntime) -> torch.Tensor:
        return self.format.unpack_rows(runtime, self.packed, self.scales, self.input_size, 0, self.output_size)

    def codes(self, runtime: NativeRuntime) -> torch.Tensor:
        """[output_size, input_size] integers."""
        scales = self.scales[: self.output_size, None] if self.format is quant.INT8 else self._scales_of_inputs()
        return torch.round(torch.where(scales != 0, self.unpacked(runtime) / scales, 0.0)).long()

    def _scales_of_inputs(self) -> torch.Tensor:
        return self.group_scales().repeat_interleave(self.group_size, dim=1)[:, : self.input_size]

    def linear(self, runtime: NativeRuntime, x: torch.Tensor, bias=None, out_dtype=None) -> torch.Tensor:
        return self.format.linear(runtime, x, self.packed, self.scales, self.output_size, bias, out_dtype=out_dtype)

    def expected(self, runtime: NativeRuntime, x: torch.Tensor, bias=None, out_dtype=None) -> torch.Tensor:
        codes = self.codes(runtime)
        if self.format is quant.INT8:
            out = reference.linear_int8(x, codes, self.scales[: self.output_size], bias, out_dtype)
        else:
            out = reference.linear_int4(x, codes, self.group_scales(), self.group_size, bias, out_dtype)
        return torch.empty(out.shape, dtype=out.dtype).copy_(out)  # rows of one number keep no broadcast stride


def pack(runtime: NativeRuntime, format: quant.QuantFormat, rows: torch.Tensor) -> Weight:
    """Pack into memory full of a pattern between guard bands."""
    packed = Guarded(*format.packed_shape(*rows.shape), dtype=quant.PACKED_DTYPE)
    scales = Guarded(*format.scales_shape(*rows.shape), dtype=format.scale_dtype)
    all_finite = format.pack_rows(runtime, rows, packed.tensor, scales.tensor, 0)
    packed.assert_bands()
    scales.assert_bands()
    return Weight(format, packed.tensor, scales.tensor, all_finite, *rows.shape)


formats = each("format", [quant.INT8, quant.INT4])
sizes = each("size", SIZES)


@formats
@sizes
@each("dtype", [BF16, F32])
def test_linear_equals_its_reference(
    runtime: NativeRuntime, format: quant.QuantFormat, size: tuple[int, int], dtype: torch.dtype
):
    weight = pack(runtime, format, randn(*size, dtype=dtype))
    for num_rows in ROWS:
        x, bias = randn(num_rows, size[1], dtype=dtype), randn(size[0], dtype=dtype)
        before = x.clone()
        assert same_bits(weight.linear(runtime, x), weight.expected(runtime, x))
        assert same_bits(weight.linear(runtime, x, bias), weight.expected(runtime, x, bias))
        assert same_bits(x, before)
    out = weight.linear(runtime, x, bias.float(), out_dtype=F32)
    assert same_bits(out, weight.expected(runtime, x, bias.float(), F32))


@formats
@sizes
def test_every_tier_packs_the_same_bytes(
    runtime: NativeRuntime, portable: NativeRuntime, format: quant.QuantFormat, size: tuple[int, int]
):
    for dtype in (BF16, torch.float16, F32):
        rows = randn(*size, dtype=dtype)
        mine, other = pack(runtime, format, rows), pack(portable, format, rows)
        assert same_bits(mine.packed, other.packed) and same_bits(mine.scales, other.scales)


@sizes
def test_int8_weights_are_those_of_the_reference(runtime: NativeRuntime, size: tuple[int, int]):
    rows = randn(*size)
    weight = pack(runtime, quant.INT8, rows)
    q, scales = reference.quantize_int8(rows)
    assert weight.all_finite and same_bits(weight.scales[: size[0]], scales)
    assert same_bits(weight.unpacked(runtime), q.float() * scales[:, None])


@sizes
def test_int4_weights_are_nearly_the_best_for_their_scales(runtime: NativeRuntime, size: tuple[int, int]):
    rows = randn(*size)
    weight = pack(runtime, quant.INT4, rows)
    group_size = weight.group_size
    scales = weight.group_scales().repeat_interleave(group_size, dim=1)[:, : size[1]]
    unpacked = weight.unpacked(runtime).double()
    # The nearest code, but for the rounding of the quotient in float32.
    best_codes = reference.nearest_int4(rows.double(), scales.double())
    error, least = (unpacked - rows).abs(), (best_codes * scales - rows).abs()
    assert weight.all_finite and bool((error <= least + 1e-5 * scales.abs()).all())
    # Scales cost at most 1 % more error than a fine search, and the rounding of a scale to 8 bits.
    q, best_scales = reference.quantize_int4(rows, group_size)
    searched = q * best_scales.repeat_interleave(group_size, dim=1)[:, : size[1]]
    limit = 1.01 * relative_error(rows, searched) + 2**-8
    assert relative_error(rows, unpacked) <= limit


@formats
def test_a_row_alone_equals_the_row_in_a_batch(
    runtime: NativeRuntime, portable: NativeRuntime, format: quant.QuantFormat
):
    weight = pack(runtime, format, randn(83, 640))
    x = randn(261, 640, dtype=BF16)  # more rows than one task takes
    batch = weight.linear(runtime, x)
    if format is quant.INT8:
        assert same_bits(batch, weight.expected(runtime, x))
    for num_rows in (1, 3, 16, 24, 37):
        assert same_bits(weight.linear(runtime, x[:num_rows]), batch[:num_rows])
    for row in (100, 240, 260):
        assert same_bits(weight.linear(runtime, x[row : row + 1]), batch[row : row + 1])
        assert same_bits(weight.linear(portable, x[row : row + 1]), batch[row : row + 1])


@formats
@each("dtype", [BF16, F32])
@each("size", [16, 48, 64])
def test_gated_products_have_the_bits_of_the_product_then_the_activation(
    runtime: NativeRuntime, portable: NativeRuntime, format: quant.QuantFormat, dtype: torch.dtype, size: int
):
    weight = pack(runtime, format, randn(2 * size, 290))
    for num_rows, bias in ((0, None), (1, None), (9, randn(2 * size, dtype=dtype)), (35, randn(2 * size))):
        x = randn(num_rows, 290, dtype=dtype)
        out = format.gated_linear(runtime, x, weight.packed, weight.scales, size, bias)
        assert same_bits(out, silu_and_mul(portable, weight.linear(runtime, x, bias)))


@formats
def test_results_go_into_columns_of_a_larger_one(runtime: NativeRuntime, format: quant.QuantFormat):
    weight, gated = pack(runtime, format, randn(45, 96)), pack(runtime, format, randn(64, 96))
    for num_rows in (1, 21):
        x, out = randn(num_rows, 96), torch.full((num_rows, 60), 7.0)
        format.linear(runtime, x, weight.packed, weight.scales, 45, out=out[:, 5:50])
        assert same_bits(out[:, 5:50], weight.linear(runtime, x))
        assert bool((out[:, :5] == 7.0).all()) and bool((out[:, 50:] == 7.0).all())
        format.gated_linear(runtime, x, gated.packed, gated.scales, 32, out=out[:, 9:41])
        assert same_bits(out[:, 9:41], format.gated_linear(runtime, x, gated.packed, gated.scales, 32))
    with pytest.raises(ShapeError, match="out"):
        format.linear(runtime, x, weight.packed, weight.scales, 45, out=out)


@formats
def test_gated_products_refuse_sizes_between_panels(runtime: NativeRuntime, format: quant.QuantFormat):
    weight = pack(runtime, format, randn(48, 64))
    with pytest.raises(ShapeError, match="intermediate_size is 24"):
        format.gated_linear(runtime, randn(1, 64), weight.packed, weight.scales, 24)
    for size in (32, 16):
        with pytest.raises(ShapeError, match="packed"):
            format.gated_linear(runtime, randn(1, 64), weight.packed, weight.scales, size)


@formats
def test_rows_are_packed_in_parts_at_any_output(runtime: NativeRuntime, format: quant.QuantFormat):
    rows = randn(75, 96)
    whole, parts = pack(runtime, format, rows), pack(runtime, format, torch.zeros(75, 96))
    for first, end in ((40, 75), (0, 3), (3, 3), (3, 40)):
        assert format.pack_rows(runtime, rows[first:end], parts.packed, parts.scales, first)
    assert same_bits(parts.unpacked(runtime), whole.unpacked(runtime))


@formats
def test_strided_rows_are_read_by_their_stride(runtime: NativeRuntime, format: quant.QuantFormat):
    wide = randn(40, 200)
    weight = pack(runtime, format, wide[:, 7:103])
    assert same_bits(weight.packed, pack(runtime, format, wide[:, 7:103].clone()).packed)
    x = randn(9, 300, dtype=BF16)[:, 5:101]
    assert same_bits(weight.linear(runtime, x), weight.linear(runtime, x.clone()))


@formats
@each("dtype", [BF16, F32])
def test_gathered_rows_are_the_unpacked_ones(runtime: NativeRuntime, format: quant.QuantFormat, dtype: torch.dtype):
    weight = pack(runtime, format, randn(70, 161))
    gather = weight.format.gather_rows
    unpacked = weight.unpacked(runtime)
    for ids in ([], [69], [3, 3, 0, 69, 17, 64]):
        wanted = torch.tensor(ids, dtype=torch.int32)
        rows = gather(runtime, wanted, weight.packed, weight.scales, 161, dtype)
        assert same_bits(rows, unpacked[wanted.long()].to(dtype))
    for bad in (-1, 80):
        with pytest.raises(ShapeError, match="ids are"):
            gather(runtime, torch.tensor([0, bad]), weight.packed, weight.scales, 161, dtype)


@formats
@each("dtype", [BF16, F32])
def test_zeros_give_the_bias_and_broken_rows_give_nan_alone(
    runtime: NativeRuntime, format: quant.QuantFormat, dtype: torch.dtype
):
    weight = pack(runtime, format, randn(35, 130))
    bias = randn(35, dtype=dtype)
    x = randn(23, 130, dtype=dtype)
    clean = weight.linear(runtime, x, bias)
    x[2] = 0.0
    x[5, 129] = torch.nan
    x[11, 0] = torch.inf
    x[22, 64] = -torch.inf
    out = weight.linear(runtime, x, bias)
    broken = [5, 11, 22]
    assert bool(out[broken].isnan().all()) and same_bits(out[2], bias)
    untouched = [row for row in range(23) if row not in (2, *broken)]
    assert same_bits(out[untouched], clean[untouched])


@formats
def test_extreme_magnitudes_are_as_exact_as_others(runtime: NativeRuntime, format: quant.QuantFormat):
    rows = randn(32, 128)
    rows[3] *= 2.0**120
    rows[4] *= 2.0**-90
    rows[5] = 0.0
    rows[6] = 2.0**-100  # counts as zero
    weight = pack(runtime, format, rows)
    unpacked = weight.unpacked(runtime)
    assert weight.all_finite and not unpacked[5:7].any()
    worst = 0.01 if format is quant.INT8 else 0.15
    for row in (0, 3, 4):
        assert relative_error(rows[row] / rows[row].abs().max(), unpacked[row] / rows[row].abs().max()) < worst
    x = randn(6, 128)
    x[1] *= 2.0**100
    x[2] *= 2.0**-80
    x[3] = 2.0**-100
    for row in (1, 2):
        scale = 2.0 ** (100 if row == 1 else -80)
        moved = weight.linear(runtime, x[row : row + 1])[0, [0, 1, 2]] / scale
        assert same_bits(moved, weight.linear(runtime, x[row : row + 1] / scale)[0, [0, 1, 2]])
    assert not weight.linear(runtime, x)[3].any()


@formats
def test_weights_that_are_not_finite_are_reported(runtime: NativeRuntime, format: quant.QuantFormat):
    for value in (torch.nan, torch.inf, -torch.inf):
        rows = randn(40, 70)
        rows[39, 69] = value
        weight = pack(runtime, format, rows)
        assert not weight.all_finite
        out = weight.linear(runtime, randn(2, 70))
        assert bool(out[:, 39].isnan().all()) and bool(out[:, :39].isfinite().all())


@formats
def test_nothing_is_written_outside_the_result(runtime: NativeRuntime, format: quant.QuantFormat):
    weight = pack(runtime, format, randn(37, 130))
    kernel = runtime.library.linear_int8 if format is quant.INT8 else runtime.library.linear_int4
    for num_rows in (1, 4, 19):
        x, out = guarded(randn(num_rows, 130)), Guarded(num_rows, 37)
        kernel(
            runtime.tier_idx, runtime.pool, x.tensor.data_ptr(), 130, weight.packed.data_ptr(),
            weight.scales.data_ptr(), 0, out.tensor.data_ptr(), 37, num_rows, 37, 130, weight.group_size,
            DTYPE_CODES[F32], DTYPE_CODES[F32], DTYPE_CODES[F32], False,
        )  # fmt: skip
        out.assert_bands()
        assert same_bits(out.tensor, weight.linear(runtime, x.tensor))


@formats
def test_impossible_tensors_are_refused(runtime: NativeRuntime, format: quant.QuantFormat):
    weight = pack(runtime, format, randn(32, 64))
    x = randn(2, 64)
    linear = weight.format.linear
    for given in (x.double(), x.T, randn(2, 65), x[0]):
        with pytest.raises(ShapeError):
            weight.linear(runtime, given)
    with pytest.raises(ShapeError, match="bias"):
        weight.linear(runtime, x, randn(33))
    with pytest.raises(ShapeError, match="out_dtype"):
        weight.linear(runtime, x, out_dtype=BF16)
    with pytest.raises(ShapeError, match="packed"):
        linear(runtime, x, weight.packed.float(), weight.scales, 32)
    with pytest.raises(ShapeError, match="packed"):
        linear(runtime, x, weight.packed, weight.scales, 33)
    with pytest.raises(ShapeError, match="scales"):
        linear(runtime, x, weight.packed, weight.scales[:1], 32)
    with pytest.raises(ShapeError, match="do not fit"):
        weight.format.pack_rows(runtime, randn(3, 64), weight.packed, weight.scales, 30)


@each(
    "input_size, group_size",
    [(1, 32), (32, 32), (33, 64), (96, 32), (127, 128), (896, 128), (320, 64), (4864, 128), (8960, 128)],
)
def test_int4_groups_are_the_largest_that_divide_the_inputs(input_size: int, group_size: int):
    assert quant.INT4.group_size(input_size) == group_size
