"""What stored weights mean: GGUF's types with the bits of the `gguf` package, the others by their definitions."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.formats.block_formats import BLOCK_FORMATS
from quire.kernels.reference.block_formats import NF4_VALUES, dequantize, dequantize_blocks
from tests.kernels.block_inputs import FLOAT16_AT, QUANTIZED, extreme_blocks, random_blocks

EVERY_TYPE = pytest.mark.parametrize("name", BLOCK_FORMATS)


def by_gguf(name: str, blocks: torch.Tensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(blocks.numpy(), kind)))


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
    assert torch.equal(ours.isnan(), theirs.isnan())
    same = ours.view(torch.int32) == theirs.view(torch.int32)
    assert (same | ours.isnan()).all()


@EVERY_TYPE
def test_random_blocks_are_what_the_gguf_package_says(name: str):
    for seed in range(4):
        blocks = random_blocks(name, 7, 512, seed, scale=10.0 ** (1 - seed))
        assert_same_bits(dequantize_blocks(name, blocks), by_gguf(name, blocks))


@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_scales_are_what_the_gguf_package_says(name: str):
    blocks = extreme_blocks(name)
    assert_same_bits(dequantize_blocks(name, blocks), by_gguf(name, blocks))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_short_float_is_what_the_gguf_package_says(name: str):
    blocks = torch.arange(-(2**15), 2**15).short().view(torch.uint8).reshape(64, -1)
    assert_same_bits(dequantize_blocks(name, blocks), by_gguf(name, blocks))


@pytest.mark.parametrize("name", [name for name in QUANTIZED if len(FLOAT16_AT.get(name, ())) < 2])
def test_every_code_occurs_in_random_blocks(name: str):
    values = dequantize_blocks(name, random_blocks(name, 1, 4096))
    assert len(values.unique()) >= 16 and (values < 0).any() and (values > 0).any()


@EVERY_TYPE
def test_rows_that_are_a_slice_of_others_are_read(name: str):
    blocks = random_blocks(name, 6, 512)
    assert torch.equal(dequantize_blocks(name, blocks[1::2]), dequantize_blocks(name, blocks)[1::2])
    empty = dequantize(name, {"blocks": blocks[:0]}, 0, 512)
    assert empty.shape == (0, 512)


def four_bits(codes: list[int]) -> torch.Tensor:
    padded = torch.tensor([*codes, 0][: len(codes) + len(codes) % 2], dtype=torch.uint8)
    return (padded[::2] | (padded[1::2] << 4))[None]


def test_int4_has_zero_points_and_a_short_last_group():
    parts = {
        "codes": four_bits([0, 15, 8, 7, 3]),
        "scales": torch.tensor([[0.5, -2.0]], dtype=torch.float16),
        "zeros": torch.tensor([[8, 5]], dtype=torch.uint8),
    }
    assert dequantize("int4", parts, 4, 5).tolist() == [[-4.0, 3.5, 0.0, -0.5, 4.0]]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_codes_of_eight_bits_are_scaled_by_group_or_row(name: str):
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    codes = torch.tensor([[-128.0, 1.0, 2.0, 112.0]]).to(dtype)
    by_group = {"codes": codes, "scales": torch.tensor([[0.5, 0.25]])}
    assert dequantize(name, by_group, 2, 4).tolist() == [[-64.0, 0.5, 0.5, 28.0]]
    by_row = {"codes": codes, "scales": torch.tensor([[2.0]])}
    assert dequantize(name, by_row, 0, 4).tolist() == [[-256.0, 2.0, 4.0, 224.0]]


def test_nf4_looks_its_codes_up():
    parts = {"codes": four_bits(list(range(16))), "scales": torch.tensor([[1.0, 2.0]])}
    expected = torch.tensor(NF4_VALUES) * torch.tensor([1.0, 2.0]).repeat_interleave(8)
    assert torch.equal(dequantize("nf4", parts, 8, 16), expected[None])


def test_mxfp4_has_powers_of_two_and_nan():
    parts = {
        "codes": four_bits([1, 2, 7, 8, 9, 15, 1, 0]),
        "scales": torch.tensor([[127, 130, 0, 255]], dtype=torch.uint8),
    }
    found = dequantize("mxfp4", parts, 2, 8)[0]
    assert found[:6].tolist() == [0.5, 1.0, 48.0, 0.0, -0.5 * 2.0**-127, -6.0 * 2.0**-127]
    assert found[6:].isnan().all()
