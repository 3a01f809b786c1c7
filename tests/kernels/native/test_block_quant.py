"""Products with weights in the block formats of GGUF: against float64, and the same bits in any batch on any tier."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.errors import ShapeError
from quire.formats.block_formats import BLOCK_FORMATS
from quire.kernels.native.block_quant import BLOCK_KERNELS, BlockKernel
from quire.kernels.native.elementwise import silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.block_formats import dequantize_blocks
from quire.kernels.reference.block_linear import linear as reference_linear
from tests.each import each
from tests.kernels.native.blocks import HALVES, random_blocks
from tests.kernels.native.guards import Guarded, assert_close, guarded, randn, same_bits

BF16, F32 = torch.bfloat16, torch.float32
# Around blocks of six rows, tiles of 16, blocks of 32, and tasks of 240.
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 31, 33, 50, 70)

kernels = each("kernel", BLOCK_KERNELS.values())


@dataclass
class Weight:
    """One matrix: its blocks, and packed by a runtime."""

    kernel: BlockKernel
    blocks: torch.Tensor
    packed: torch.Tensor
    is_finite: bool

    @property
    def output_size(self) -> int:
        return self.blocks.shape[0]

    def linear(self, runtime: NativeRuntime, x: torch.Tensor, bias=None, out_dtype=None, out=None) -> torch.Tensor:
        return self.kernel.linear(runtime, x, self.packed, self.output_size, bias, out_dtype=out_dtype, out=out)


def pack(runtime: NativeRuntime, kernel: BlockKernel, blocks: torch.Tensor) -> Weight:
    """Pack into memory full of a pattern between guard bands."""
    input_size = blocks.shape[1] // kernel.block_bytes * kernel.block_size
    packed = Guarded(*kernel.packed_shape(blocks.shape[0], input_size), dtype=torch.uint8)
    is_finite = kernel.pack_rows(runtime, blocks, packed.tensor, 0)
    packed.assert_bands()
    return Weight(kernel, blocks, packed.tensor, is_finite)


def inputs_of(kernel: BlockKernel) -> int:
    """More than a chunk of 256; in blocks of 32 not a whole record."""
    return 288 if kernel.block_size == 32 else 512


def random_weight(runtime: NativeRuntime, kernel: BlockKernel, num_rows: int = 83) -> Weight:
    return pack(runtime, kernel, random_blocks(kernel, num_rows, inputs_of(kernel)))


@kernels
def test_sizes_are_those_of_the_library_and_of_the_formats(runtime: NativeRuntime, kernel: BlockKernel):
    sizes = (kernel.block_size, kernel.block_bytes, kernel.record_size, kernel.record_bytes)
    assert runtime.library.block_layout(kernel.number) == sizes
    format = BLOCK_FORMATS[kernel.name]
    assert (format.block_size, format.block_bytes) == (kernel.block_size, kernel.block_bytes)
    # Repacked, a weight is at most 6 % larger than in the file.
    per_input = kernel.record_bytes / kernel.record_size / 16
    assert per_input <= 1.06 * kernel.block_bytes / kernel.block_size


@kernels
@each("num_rows, num_blocks", [(1, 1), (16, 2), (37, 3), (48, 5)])
def test_unpacked_weights_are_the_numbers_of_the_reference(
    runtime: NativeRuntime, kernel: BlockKernel, num_rows: int, num_blocks: int
):
    input_size = num_blocks * kernel.block_size
    blocks = random_blocks(kernel, num_rows, input_size)
    if kernel.name == "MXFP4":
        blocks[0, 0], blocks[-1, 0] = 0, 252  # the smallest scale, and the largest without infinite weights
    else:
        place = HALVES[kernel.name][0]
        blocks[0, place : place + 2] = torch.tensor([3, 0], dtype=torch.uint8)  # a subnormal half
    weight = pack(runtime, kernel, blocks)
    assert weight.is_finite
    unpacked = kernel.unpack_rows(runtime, weight.packed, input_size, 0, num_rows)
    assert same_bits(unpacked, dequantize_blocks(kernel.name, blocks))


@kernels
def test_every_tier_packs_the_same_bytes(runtime: NativeRuntime, portable: NativeRuntime, kernel: BlockKernel):
    blocks = random_blocks(kernel, 35, inputs_of(kernel))
    assert same_bits(pack(runtime, kernel, blocks).packed, pack(portable, kernel, blocks).packed)


@kernels
@each("dtype", [BF16, F32])
def test_products_are_those_of_float64(runtime: NativeRuntime, kernel: BlockKernel, dtype: torch.dtype):
    weight = random_weight(runtime, kernel)
    x, bias = randn(19, inputs_of(kernel), dtype=dtype), randn(83, dtype=dtype)
    before = x.clone()
    for num_rows in (0, 1, 5, 19):
        out = weight.linear(runtime, x[:num_rows], bias, out_dtype=F32)
        expected, magnitude = reference_linear(x[:num_rows], dequantize_blocks(kernel.name, weight.blocks), bias)
        # A handful of roundings for each of some ten groups.
        assert_close(out, expected, atol=64 * 2**-24 * magnitude)
        assert same_bits(weight.linear(runtime, x[:num_rows], bias), out.to(dtype))
    assert same_bits(x, before)


@kernels
def test_a_row_has_the_same_bits_in_every_batch_on_every_tier(
    runtime: NativeRuntime, portable: NativeRuntime, kernel: BlockKernel
):
    weight = random_weight(runtime, kernel)
    x = randn(260, inputs_of(kernel), dtype=BF16)  # more rows than one task takes
    batch = weight.linear(runtime, x, out_dtype=F32)
    for num_rows in ROWS:
        assert same_bits(weight.linear(runtime, x[:num_rows], out_dtype=F32), batch[:num_rows])
    for row in (0, 100, 240, 259):
        assert same_bits(weight.linear(portable, x[row : row + 1], out_dtype=F32), batch[row : row + 1])


def test_a_row_has_the_same_bits_in_every_batch_up_to_70(runtime: NativeRuntime):
    for name in ("Q4_0", "Q2_K", "Q4_K", "Q6_K"):
        weight = random_weight(runtime, BLOCK_KERNELS[name], 33)
        x = randn(70, inputs_of(BLOCK_KERNELS[name]))
        batch = weight.linear(runtime, x)
        for num_rows in range(1, 70):
            assert same_bits(weight.linear(runtime, x[-num_rows:]), batch[-num_rows:])


@kernels
@each("dtype", [BF16, F32])
def test_gated_products_have_the_bits_of_the_product_then_the_activation(
    runtime: NativeRuntime, portable: NativeRuntime, kernel: BlockKernel, dtype: torch.dtype
):
    for size in (16, 80):
        weight = random_weight(runtime, kernel, 2 * size)
        for num_rows, bias in ((0, None), (1, None), (9, randn(2 * size, dtype=dtype)), (35, randn(2 * size))):
            x = randn(num_rows, inputs_of(kernel), dtype=dtype)
            out = kernel.gated_linear(runtime, x, weight.packed, size, bias)
            assert same_bits(out, silu_and_mul(portable, weight.linear(runtime, x, bias)))


@kernels
def test_results_go_into_columns_of_a_larger_one(runtime: NativeRuntime, kernel: BlockKernel):
    weight = random_weight(runtime, kernel, 45)
    for num_rows in (1, 21):
        x, out = guarded(randn(num_rows, inputs_of(kernel))), Guarded(num_rows, 60)
        out.tensor.fill_(7.0)
        columns = out.tensor[:, 5:50]
        assert weight.linear(runtime, x.tensor, out=columns).data_ptr() == columns.data_ptr()
        assert same_bits(columns, weight.linear(runtime, x.tensor))
        assert bool((out.tensor[:, :5] == 7.0).all()) and bool((out.tensor[:, 50:] == 7.0).all())
        out.assert_bands()
        gated = random_weight(runtime, kernel, 64)
        kernel.gated_linear(runtime, x.tensor, gated.packed, 32, out=out.tensor[:, 11:43])
        assert same_bits(out.tensor[:, 11:43], kernel.gated_linear(runtime, x.tensor, gated.packed, 32))


@kernels
@each("dtype", [BF16, F32])
def test_gathered_rows_are_the_unpacked_ones(runtime: NativeRuntime, kernel: BlockKernel, dtype: torch.dtype):
    weight, input_size = random_weight(runtime, kernel, 70), inputs_of(kernel)
    unpacked = kernel.unpack_rows(runtime, weight.packed, input_size, 0, 70)
    for ids in ([], [69], [3, 3, 0, 69, 17, 64]):
        wanted = torch.tensor(ids, dtype=torch.int32)
        rows = kernel.gather_rows(runtime, wanted, weight.packed, input_size, dtype)
        assert same_bits(rows, unpacked[wanted.long()].to(dtype))
    for bad in (-1, 80):
        with pytest.raises(ShapeError, match="ids are"):
            kernel.gather_rows(runtime, torch.tensor([0, bad]), weight.packed, input_size, dtype)


@kernels
def test_rows_are_packed_in_parts_at_any_output_with_any_stride(runtime: NativeRuntime, kernel: BlockKernel):
    input_size = inputs_of(kernel)
    wide = torch.nn.functional.pad(random_blocks(kernel, 75, input_size), (3, 8))
    blocks = wide[:, 3:-8]
    whole, parts = pack(runtime, kernel, blocks.contiguous()), pack(runtime, kernel, torch.zeros_like(blocks))
    for first, end in ((40, 75), (0, 3), (3, 3), (3, 40)):
        assert kernel.pack_rows(runtime, blocks[first:end], parts.packed, first)
    expected = kernel.unpack_rows(runtime, whole.packed, input_size, 0, 75)
    assert same_bits(kernel.unpack_rows(runtime, parts.packed, input_size, 0, 75), expected)
    x = randn(9, 2 * input_size, dtype=BF16)[:, 5 : 5 + input_size]
    assert same_bits(whole.linear(runtime, x), parts.linear(runtime, x.contiguous()))


@kernels
def test_scales_that_are_not_finite_are_reported(runtime: NativeRuntime, kernel: BlockKernel):
    input_size = inputs_of(kernel)
    for place in HALVES[kernel.name] or (0,):
        for half in (0x7C00, 0xFC00, 0x7E01):
            blocks = random_blocks(kernel, 40, input_size).view(-1, kernel.block_bytes)
            bad = torch.tensor([half & 255, half >> 8]).to(torch.uint8) if HALVES[kernel.name] else torch.tensor([255])
            blocks[-1, place : place + len(bad)] = bad
            weight = pack(runtime, kernel, blocks.view(40, -1))
            assert not weight.is_finite
            out = weight.linear(runtime, randn(2, input_size))
            assert bool(out[:, :39].isfinite().all())


@kernels
@each("dtype", [BF16, F32])
def test_zeros_give_the_bias_and_broken_rows_give_nan_alone(
    runtime: NativeRuntime, kernel: BlockKernel, dtype: torch.dtype
):
    weight = random_weight(runtime, kernel, 35)
    bias, x = randn(35, dtype=dtype), randn(23, inputs_of(kernel), dtype=dtype)
    clean = weight.linear(runtime, x, bias)
    x[2] = 0.0
    x[3] = 2.0**-100  # counts as zero
    x[5, 129] = torch.nan
    x[11, 0] = torch.inf
    x[22, 64] = -torch.inf
    out = weight.linear(runtime, x, bias)
    broken = [5, 11, 22]
    assert bool(out[broken].isnan().all()) and same_bits(out[2], bias) and same_bits(out[3], bias)
    untouched = [row for row in range(23) if row not in (2, 3, *broken)]
    assert same_bits(out[untouched], clean[untouched])


@kernels
def test_impossible_tensors_are_refused(runtime: NativeRuntime, kernel: BlockKernel):
    size = kernel.block_size
    weight = pack(runtime, kernel, random_blocks(kernel, 32, size))
    x = randn(2, size)
    for given in (x.double(), x.T, randn(2, size + 1), randn(2, 5 * size), x[0]):
        with pytest.raises(ShapeError):
            weight.linear(runtime, given)
    with pytest.raises(ShapeError, match="bias"):
        weight.linear(runtime, x, randn(33))
    with pytest.raises(ShapeError, match="out_dtype"):
        weight.linear(runtime, x, out_dtype=BF16)
    for out in (randn(2, 31), randn(3, 32), randn(2, 32).bfloat16(), randn(32, 2).T):
        with pytest.raises(ShapeError, match="out"):
            weight.linear(runtime, x, out=out)
    with pytest.raises(ShapeError, match="share memory"):
        weight.linear(runtime, x[:, :size], out=x.view(-1)[:64].view(2, 32))
    with pytest.raises(ShapeError, match="packed"):
        kernel.linear(runtime, x, weight.packed.view(torch.int8), 32)
    for output_size in (16, 33):
        with pytest.raises(ShapeError, match="packed"):
            kernel.linear(runtime, x, weight.packed, output_size)
    with pytest.raises(ShapeError, match="intermediate_size is 24"):
        kernel.gated_linear(runtime, x, weight.packed, 24)
    with pytest.raises(ShapeError, match="do not fit"):
        kernel.pack_rows(runtime, weight.blocks[:3], weight.packed, 30)
    with pytest.raises(ShapeError, match="not whole blocks"):
        kernel.pack_rows(runtime, weight.blocks[:, :-1], weight.packed, 0)
    with pytest.raises(ShapeError, match="packed"):
        kernel.pack_rows(runtime, torch.cat([weight.blocks] * 5, dim=1), weight.packed, 0)
    with pytest.raises(ShapeError, match=f"multiple of {size}"):
        kernel.packed_shape(16, size + 1)
    with pytest.raises(ShapeError, match="num_rows"):
        kernel.unpack_rows(runtime, weight.packed, size, 30, 3)
