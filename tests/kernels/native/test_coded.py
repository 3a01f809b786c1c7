"""Products with coded weights: equal to the reference in order, whatever the tier, the threads and the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import coded
from quire.kernels.native.elementwise import silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import coded as reference
from quire.kernels.reference.block_formats import dequantize
from tests.each import each
from tests.kernels.native.guards import Guarded, guarded, randn, same_bits

BF16, F32 = torch.bfloat16, torch.float32
# (outputs, inputs, inputs of a group): around panels of 16, tiles of 32 and blocks of 8 tiles.
SIZES = [(1, 1, 0), (17, 33, 32), (33, 160, 64), (40, 320, 128), (20, 600, 0), (16, 1100, 512)]
ROWS = [0, 1, 2, 7, 12, 17, 40]

codes = each("code", list(coded.CODES.values()))


@dataclass
class Rows:
    """Rows of codes, and what they stand for."""

    code: coded.Code
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    input_size: int
    group_size: int

    def values(self) -> torch.Tensor:
        """As the products take them."""
        return self._dequantized(torch.ones_like(self.scales)).to(BF16).float()

    def numbers(self) -> torch.Tensor:
        """What they mean, but for the rounding of the values."""
        scales = self.scales.repeat_interleave(self.group_size or self.input_size, dim=1)
        return self.values() * scales[:, : self.input_size]

    def _dequantized(self, scales: torch.Tensor) -> torch.Tensor:
        parts = {"codes": self.codes, "scales": scales} | ({} if self.zeros is None else {"zeros": self.zeros})
        return dequantize(self.code.name, parts, self.group_size, self.input_size)


def make_rows(code: coded.Code, num_rows: int, input_size: int, group_size: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed + num_rows + input_size)
    groups = -(-input_size // group_size) if group_size else 1
    width = input_size if code.num_bits == 8 else -(-input_size // 2)
    raw = torch.randint(0, 256, (num_rows, width), generator=generator, dtype=torch.uint8)
    if code.name == "fp8":
        raw[raw & 127 == 127] = 0
    zeros = torch.randint(0, 16, (num_rows, groups), generator=generator, dtype=torch.uint8) if code.has_zeros else None
    scales = torch.rand(num_rows, groups, generator=generator) + 0.5
    return Rows(code, raw.view(code.dtype), scales, zeros, input_size, group_size)


def pack(runtime: NativeRuntime, rows: Rows) -> coded.CodedWeight:
    """Into memory between guard bands."""
    memory: list[Guarded] = []

    def allocate(shape, dtype):
        memory.append(guarded(torch.zeros(tuple(shape), dtype=dtype)))
        return memory[-1].tensor

    weight = coded.make_weight(rows.code, len(rows.codes), rows.input_size, rows.group_size, allocate)
    half = len(rows.codes) // 2
    for part in (slice(0, half), slice(half, len(rows.codes))):
        zeros = None if rows.zeros is None else rows.zeros[part]
        assert coded.pack_rows(runtime, weight, rows.codes[part], rows.scales[part], zeros, part.start)
    for band in memory:
        band.assert_bands()
    return weight


@codes
@each("size", SIZES)
def test_every_output_has_the_bits_of_the_reference_in_order(
    runtime: NativeRuntime, code: coded.Code, size: tuple[int, int, int]
):
    output_size, input_size, group_size = size
    rows = make_rows(code, output_size, input_size, group_size)
    weight, x = pack(runtime, rows), randn(max(ROWS), input_size, dtype=BF16)
    expected = reference.linear_in_order(x, rows.values(), rows.scales, group_size)
    for num_rows in ROWS:
        out = Guarded(num_rows, output_size, dtype=F32)
        coded.linear(runtime, x[:num_rows], weight, output_size, out_dtype=F32, out=out.tensor)
        assert same_bits(out.tensor, expected[:num_rows]), f"{num_rows} rows"
        out.assert_bands()
    assert same_bits(coded.linear(runtime, x, weight, output_size), expected.to(BF16))


@codes
def test_a_row_does_not_depend_on_its_batch(runtime: NativeRuntime, code: coded.Code):
    weight, x = pack(runtime, make_rows(code, 80, 320, 64)), randn(300, 320, dtype=BF16, seed=1)
    alone = torch.cat([coded.linear(runtime, x[i : i + 1], weight, 80) for i in range(len(x))])
    for num_rows in (2, 5, 8, 16, 33, 100, 300):
        assert same_bits(coded.linear(runtime, x[-num_rows:], weight, 80), alone[-num_rows:])


@codes
@each("num_rows", [1, 20])
def test_gated_products_have_the_bits_of_the_product_then_the_activation(
    runtime: NativeRuntime, code: coded.Code, num_rows: int
):
    weight, x = pack(runtime, make_rows(code, 96, 128, 32)), randn(num_rows, 128, dtype=BF16)
    bias = randn(96, seed=2)
    gated = coded.linear(runtime, x, weight, 48, bias, is_gated=True)
    assert same_bits(gated, silu_and_mul(runtime, coded.linear(runtime, x, weight, 96, bias)))


@codes
def test_columns_may_belong_to_inputs_in_another_order(runtime: NativeRuntime, code: coded.Code):
    weight, x = pack(runtime, make_rows(code, 32, 128, 64)), randn(20, 128, dtype=BF16)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    expected = coded.linear(runtime, x[:, order].contiguous(), weight, 32)
    assert same_bits(coded.linear(runtime, x, weight, 32, order=order.int()), expected)
    with pytest.raises(ShapeError, match="order names an input"):
        coded.linear(runtime, x, weight, 32, order=order.int() + 1)


@codes
@each("with_order", [False, True])
def test_rows_of_experts_have_the_bits_of_their_products(runtime: NativeRuntime, code: coded.Code, with_order: bool):
    num_experts, outputs, inputs = 3, 20, 96
    parts = [make_rows(code, 32, inputs, 32, seed) for seed in range(num_experts)]
    both = replace(
        parts[0],
        codes=torch.cat([part.codes.view(torch.uint8) for part in parts]).view(code.dtype),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]) if code.has_zeros else None,  # type: ignore[list-item]
    )
    weight, x = pack(runtime, both), randn(8, inputs, dtype=BF16)
    rows = torch.tensor([0, 3, 3, 7, 1], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    orders = [torch.randperm(inputs, generator=torch.Generator().manual_seed(i)) for i in range(num_experts)]
    order = torch.stack(orders).int() if with_order else None
    bias = randn(num_experts, outputs, seed=3)
    actual = coded.grouped_linear(runtime, x, rows, starts, weight, outputs, bias, order=order)
    for expert in range(num_experts):
        own = x[rows[starts[expert] : starts[expert + 1]].long()]
        alone = pack(runtime, replace(parts[expert]))
        expected = coded.linear(
            runtime, own, replace(alone, packed=alone.packed), 32, torch.cat([bias[expert], torch.zeros(12)]),
            order=None if order is None else order[expert],
        )  # fmt: skip
        assert same_bits(actual[starts[expert] : starts[expert + 1]], expected[:, :outputs].contiguous())


@codes
def test_rows_come_back_as_their_numbers(runtime: NativeRuntime, code: coded.Code):
    rows = make_rows(code, 20, 70, 32)
    weight, ids = pack(runtime, rows), torch.tensor([19, 0, 7, 7])
    numbers = rows.numbers()
    assert same_bits(coded.gather_rows(runtime, ids, weight, F32), numbers[ids])
    assert same_bits(coded.gather_rows(runtime, ids, weight, BF16), numbers[ids].to(BF16))


@codes
def test_numbers_that_are_not_finite_are_told(runtime: NativeRuntime, code: coded.Code):
    rows = make_rows(code, 20, 64, 32)
    weight = pack(runtime, rows)
    scales = rows.scales.clone()
    scales[3, 1] = torch.nan
    assert not coded.pack_rows(runtime, weight, rows.codes, scales, rows.zeros, 0)
    if code.name == "fp8":
        rows.codes.view(torch.uint8)[2, 5] = 0xFF
        assert not coded.pack_rows(runtime, weight, rows.codes, rows.scales, rows.zeros, 0)


def test_wrong_calls_are_refused(runtime: NativeRuntime):
    rows = make_rows(coded.CODES["int4"], 20, 64, 32)
    weight, x = pack(runtime, rows), randn(2, 64, dtype=BF16)
    wrong = {
        "x": lambda: coded.linear(runtime, x[:, :32], weight, 20),
        "packed": lambda: coded.linear(runtime, x, weight, 64),
        "scales": lambda: coded.linear(runtime, x, replace(weight, scales=weight.scales[:, :1].contiguous()), 20),
        "zeros": lambda: coded.linear(runtime, x, replace(weight, zeros=None), 20),
        "output_size": lambda: coded.linear(runtime, x, weight, 10, is_gated=True),
        "first_row": lambda: coded.pack_rows(runtime, weight, rows.codes, rows.scales, rows.zeros, 13),
        "group_size": lambda: coded.make_weight(rows.code, 16, 64, 48, lambda shape, dtype: torch.zeros(1)),
        "ids": lambda: coded.gather_rows(runtime, torch.tensor([32]), weight, F32),
    }
    for field, call in wrong.items():
        with pytest.raises(ShapeError) as error:
            call()
        assert error.value.field == field
