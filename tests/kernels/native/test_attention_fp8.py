"""A KV cache of eight-bit floats: every code, the rounding to them, and attention as over their exact values."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import (
    copy_pages,
    paged_attention,
    reshape_and_cache,
    rope_and_cache,
    unpack_kv_cache,
)
from quire.kernels.native.runtime import NativeRuntime
from tests.each import each
from tests.kernels.native.guards import Guarded, guarded, randn, same_bits
from tests.kernels.native.paged import Shape, Step, make_step, pack_kv_cache
from tests.kernels.native.test_attention import MIX, OPTIONS

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SHAPES = [
    Shape(),
    Shape(7, 1, 40, 16),
    Shape(14, 2, 64, 32),
    Shape(3, 3, 80, 48),
    Shape(2, 1, 34, 64),
    Shape(1, 1, 2, 32),
    Shape(40, 2, 256, 32),
]


@pytest.fixture(params=LARGEST, ids=["e4m3", "e5m2"])
def code_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype = request.param
    assert isinstance(dtype, torch.dtype)
    return dtype


def pack_codes(key_codes: torch.Tensor, value_codes: torch.Tensor, code_dtype: torch.dtype) -> torch.Tensor:
    """Two [num_blocks, block_size, num_kv_heads, head_size] uint8 to the layout of the native kernels."""
    return pack_kv_cache(key_codes, value_codes).view(code_dtype)


@cache
def steps_of(shape: Shape, code_dtype: torch.dtype, option: str = "plain") -> tuple[Step, torch.Tensor, torch.Tensor]:
    """A step whose caches hold exact values of codes, the packed codes, and the output over the exact values."""
    step = make_step(MIX, shape, stale=float("nan"), **OPTIONS[option])
    codes = [cache.to(code_dtype) for cache in (step.key_cache, step.value_cache)]
    step.key_cache, step.value_cache = (code.to(torch.bfloat16) for code in codes)
    packed = pack_codes(codes[0].view(torch.uint8), codes[1].view(torch.uint8), code_dtype)
    return step, packed, step.run(NativeRuntime("portable"))


@each("shape", SHAPES)
def test_attention_has_the_bits_of_attention_over_the_exact_values(
    runtime: NativeRuntime, shape: Shape, code_dtype: torch.dtype
):
    step, packed, expected = steps_of(shape, code_dtype)
    codes, out = guarded(packed.view(torch.uint8)), Guarded(*step.query.shape, dtype=torch.bfloat16)
    paged_attention(
        runtime, step.query, codes.tensor.view(code_dtype), step.block_table, step.query_start_loc, step.seq_lens, 0.17,
        out=out.tensor,
    )  # fmt: skip
    assert same_bits(out.tensor, expected)
    assert not bool(out.tensor.isnan().any())
    assert torch.equal(codes.tensor, packed.view(torch.uint8)), "the cache was written"
    out.assert_bands()


@each("option", ["window 7", "window 300", "all of them"])
def test_options_have_the_bits_of_attention_over_the_exact_values(
    runtime: NativeRuntime, option: str, code_dtype: torch.dtype
):
    step, packed, expected = steps_of(Shape(), code_dtype, option)
    output = paged_attention(
        runtime, step.query, packed, step.block_table, step.query_start_loc, step.seq_lens, 0.17, **step.options
    )
    assert same_bits(output, expected)


def test_every_code_is_read_exactly(runtime: NativeRuntime, code_dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256).repeat(1, 16, 1, 1)
    kv_cache = pack_codes(torch.zeros_like(codes), codes, code_dtype)
    one = torch.ones(1, dtype=torch.int32)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    query = randn(1, 1, 256, dtype=torch.bfloat16)
    output = paged_attention(runtime, query, kv_cache, table, starts, one, 1.0)
    expected = codes[0, :1].view(code_dtype).float()
    assert torch.equal(output.float().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_every_number_is_rounded_to_the_nearest_code(runtime: NativeRuntime, code_dtype: torch.dtype):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 1, 256)
    kv_cache = torch.zeros(8, 1, 2, 32 * 256, dtype=torch.uint8).view(code_dtype)
    reshape_and_cache(runtime, numbers, numbers.flip(0), kv_cache, torch.arange(256))
    keys, values = (part.view(256, 1, 256) for part in unpack_kv_cache(kv_cache, 256))
    largest = LARGEST[code_dtype]
    expected = numbers.float().clamp(-largest, largest).to(code_dtype)
    is_nan = numbers.isnan()
    assert torch.equal(keys.float().isnan(), is_nan) and torch.equal(values.flip(0).float().isnan(), is_nan)
    assert torch.equal(keys.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])
    assert same_bits(values.flip(0).contiguous(), keys)


def test_rotated_keys_are_rounded_as_written_ones(runtime: NativeRuntime, code_dtype: torch.dtype):
    num_tokens, slots = 13, torch.randperm(48, generator=torch.Generator().manual_seed(0))[:13]
    slots[3] = -1
    qkv, angles = randn(num_tokens, 8 * 40, dtype=torch.bfloat16), randn(20, 10)
    caches = [torch.zeros(3, 2, 2, 16 * 40, dtype=dtype) for dtype in (torch.bfloat16, torch.uint8)]
    for kv_cache in (caches[0], caches[1].view(code_dtype)):
        rope_and_cache(
            runtime, qkv.clone(), 4, 2, 40, angles.cos(), angles.sin(), torch.arange(num_tokens), slots, kv_cache, 16
        )
    exact = unpack_kv_cache(caches[0], 40)
    for codes, numbers in zip(unpack_kv_cache(caches[1].view(code_dtype), 40), exact, strict=True):
        assert torch.equal(codes.view(torch.uint8), numbers.to(code_dtype).view(torch.uint8))


def test_pages_of_codes_are_copied_whole(runtime: NativeRuntime, code_dtype: torch.dtype):
    codes = torch.randint(256, (6, 1, 2, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    cache = guarded(codes)
    copy_pages(runtime, cache.tensor.view(code_dtype), torch.tensor([1, 4]), torch.tensor([0, 5]))
    assert torch.equal(cache.tensor, codes[[1, 1, 2, 3, 4, 4]])
    cache.assert_bands()


def test_other_activations_than_bfloat16_are_refused(runtime: NativeRuntime, code_dtype: torch.dtype):
    kv_cache, key = torch.zeros(1, 1, 2, 16 * 8, dtype=torch.uint8).view(code_dtype), randn(1, 1, 8)
    with pytest.raises(ShapeError, match=r"kv_cache is torch\.float8.*expected torch\.float32"):
        reshape_and_cache(runtime, key, key, kv_cache, torch.tensor([0]))
