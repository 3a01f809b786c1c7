"""Native latent attention against its reference, and the bits that must not depend on the company a query keeps.

Tolerances, for values below 4.5: as in test_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.latent import head_linear, latent_attention, write_latent_tokens
from quire.kernels.native.linear import pack_rows, packed_shape
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import latent as reference
from tests.each import each
from tests.kernels.native.guards import Guarded, assert_close, guarded, randn, same_bits

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCES = {BF16: 3 * 2**-9 * 4.5, F32: 2e-5}
MIX = ((1, 1), (1, 17), (5, 5), (1, 300), (9, 290), (1, 32), (3, 4), (40, 70), (1, 513))
Batch = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Shape:
    """What the steps of a test have in common."""

    num_heads: int = 4
    latent_size: int = 48
    rope_size: int = 16
    block_size: int = 32
    dtype: torch.dtype = BF16

    @property
    def width(self) -> int:
        return self.latent_size + self.rope_size


SHAPES = [Shape(), Shape(1, 2, 2, 16), Shape(3, 34, 6, 48), Shape(16, 512, 64, 16), Shape(70, 18, 4, 64)]


@dataclass
class Step:
    """Queries over pages. Pages of no request hold NaN, and unwritten slots of a request's last page hold `stale`."""

    shape: Shape
    query: torch.Tensor
    latents: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    def run(self, runtime: NativeRuntime) -> torch.Tensor:
        """The kernel's output; asserts that nothing else was written."""
        latents = guarded(self.latents)
        out = Guarded(*self.query.shape[:2], self.shape.latent_size, dtype=self.query.dtype)
        latent_attention(
            runtime, self.query, latents.tensor, self.shape.latent_size, self.block_table, self.query_start_loc,
            self.seq_lens, 0.17, out=out.tensor,
        )  # fmt: skip
        latents.assert_bands()
        out.assert_bands()
        assert same_bits(latents.tensor, self.latents), "the cache was written"
        return out.tensor.clone()

    def expected(self) -> torch.Tensor:
        """The reference's output, computed in float64."""
        return reference.latent_attention(
            self.query.double(), self.latents.double(), self.shape.latent_size, self.block_table.clamp(min=0),
            self.query_start_loc, self.seq_lens, 0.17,
        )  # fmt: skip


def make_step(batch: Batch, shape: Shape, *, stale: float = 1e4) -> Step:
    """Requests of (query_len, seq_len). A request's numbers depend on its place in the batch and the shape alone."""
    size = shape.block_size
    num_pages = [-(-seq_len // size) for _, seq_len in batch]
    num_blocks = sum(num_pages) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    latents = torch.full((num_blocks, size, shape.width), float("nan"))
    table = torch.full((len(batch), max(num_pages, default=0) + 1), -1, dtype=torch.int32)
    queries = [torch.empty(0, shape.num_heads, shape.width)]
    for request, (query_len, seq_len) in enumerate(batch):
        generator = torch.Generator().manual_seed(request)
        pages = [order.pop() for _ in range(num_pages[request])]
        table[request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        numbers = torch.full((len(pages) * size, shape.width), stale)
        numbers[:seq_len] = torch.randn(seq_len, shape.width, generator=generator)
        latents[pages] = numbers.view(len(pages), size, shape.width)
        every_query = torch.randn(seq_len, shape.num_heads, shape.width, generator=generator) * 64**0.5
        queries.append(every_query[seq_len - query_len :] / shape.width**0.5)
    return Step(
        shape=shape,
        query=torch.cat(queries).to(shape.dtype),
        latents=latents.to(shape.dtype),
        block_table=table,
        query_start_loc=torch.tensor([0] + [n for n, _ in batch]).cumsum(0).int(),
        seq_lens=torch.tensor([n for _, n in batch], dtype=torch.int32),
    )


def with_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    return Shape(shape.num_heads, shape.latent_size, shape.rope_size, shape.block_size, dtype)


@cache
def step_of(batch: tuple[tuple[int, int], ...], shape: Shape) -> Step:
    return make_step(batch, shape)


@cache
def expected_of(batch: tuple[tuple[int, int], ...], shape: Shape) -> torch.Tensor:
    return step_of(batch, shape).expected()


@cache
def portable_output(batch: tuple[tuple[int, int], ...], shape: Shape) -> torch.Tensor:
    return step_of(batch, shape).run(NativeRuntime("portable"))


@each("dtype", TOLERANCES)
@each("shape", SHAPES)
def test_every_shape_equals_the_reference_with_the_bits_of_every_tier(
    runtime: NativeRuntime, shape: Shape, dtype: torch.dtype
):
    shape = with_dtype(shape, dtype)
    output = step_of(MIX, shape).run(runtime)
    assert_close(output, expected_of(MIX, shape), atol=TOLERANCES[dtype])
    assert same_bits(output, portable_output(MIX, shape))


@each("batch", [(), ((0, 5),), ((1, 1), (0, 9), (2, 2))])
def test_requests_without_queries_cost_nothing(runtime: NativeRuntime, batch: tuple[tuple[int, int], ...]):
    step = step_of(batch, Shape())
    assert_close(step.run(runtime), step.expected(), atol=TOLERANCES[BF16])


@each("dtype", TOLERANCES)
@each("chunk", [1, 7, 64])
def test_a_prompt_has_the_same_bits_in_any_chunks_as_its_decodes(
    runtime: NativeRuntime, chunk: int, dtype: torch.dtype
):
    seq_len, shape = 276, Shape(dtype=dtype)
    step, whole = step_of(((seq_len, seq_len),), shape), portable_output(((seq_len, seq_len),), shape)
    # Some chunks only: the first tokens, those around the end of the first split, the last.
    starts = [start for start in range(0, seq_len, chunk) if start < 20 or 240 < start + chunk < 276 or start > 270]
    for start in starts:
        end = min(seq_len, start + chunk)
        output = latent_attention(
            runtime, step.query[start:end], step.latents, shape.latent_size, step.block_table,
            torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([end], dtype=torch.int32), 0.17,
        )  # fmt: skip
        assert same_bits(output, whole[start:end])


@each("dtype", TOLERANCES)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(runtime: NativeRuntime, dtype: torch.dtype):
    shape = Shape(dtype=dtype)
    step, together = step_of(MIX, shape), portable_output(MIX, shape)
    starts = step.query_start_loc.tolist()
    for i, (query_len, _) in enumerate(MIX):
        output = latent_attention(
            runtime, step.query[starts[i] : starts[i + 1]], step.latents, shape.latent_size,
            step.block_table[i : i + 1], torch.tensor([0, query_len], dtype=torch.int32), step.seq_lens[i : i + 1],
            0.17,
        )  # fmt: skip
        assert same_bits(output, together[starts[i] : starts[i + 1]])


@each("dtype", TOLERANCES)
@each("batch", [((1, 1300),), ((3, 1030), (1, 20))])
def test_a_context_shared_by_threads_has_the_same_bits(
    runtime: NativeRuntime, batch: tuple[tuple[int, int], ...], dtype: torch.dtype
):
    shape = Shape(dtype=dtype)
    output = step_of(batch, shape).run(runtime)
    assert_close(output, expected_of(batch, shape), atol=TOLERANCES[dtype])
    assert same_bits(output, portable_output(batch, shape))


@each("dtype", TOLERANCES)
def test_the_size_of_pages_changes_no_bit(runtime: NativeRuntime, dtype: torch.dtype):
    expected = portable_output(MIX, Shape(dtype=dtype))
    for size in (16, 48, 64):
        assert same_bits(make_step(MIX, Shape(block_size=size, dtype=dtype)).run(runtime), expected)


@each("dtype", TOLERANCES)
@each("stale", [0.0, float("nan"), float("inf")])
def test_what_lies_in_unwritten_slots_changes_no_bit(runtime: NativeRuntime, stale: float, dtype: torch.dtype):
    step = make_step(MIX, Shape(dtype=dtype), stale=stale)
    assert same_bits(step.run(runtime), portable_output(MIX, Shape(dtype=dtype)))


def test_rows_past_the_last_request_come_back_as_zeros(runtime: NativeRuntime):
    step = make_step(((1, 5), (2, 40)), Shape())
    expected = step.run(runtime)
    step.query = torch.cat((step.query, torch.full((3, 4, 64), float("nan"), dtype=BF16)))
    output = step.run(runtime)
    assert same_bits(output[:3], expected) and bool((output[3:] == 0).all())


@each("dtype", TOLERANCES)
def test_extreme_scores_do_not_overflow(runtime: NativeRuntime, dtype: torch.dtype):
    step = make_step(((1, 40), (4, 300)), Shape(dtype=dtype))
    step.query = step.query * 1e4
    assert_close(step.run(runtime), step.expected(), atol=5e-2)


@each("dtype", TOLERANCES)
def test_latents_and_rotated_keys_are_written_where_their_slots_are(runtime: NativeRuntime, dtype: torch.dtype):
    num_tokens, num_heads, nope, latent_size, half = 11, 3, 10, 34, 9
    width = latent_size + 2 * half
    query = randn(num_tokens, num_heads + 1, nope + 2 * half, dtype=dtype)[:, :num_heads]
    latent = randn(num_tokens, width + 5, dtype=dtype, seed=1)[:, :width]
    norm, (cos, sin) = randn(latent_size, dtype=dtype, seed=2), (randn(20, half, seed=seed) for seed in (3, 4))
    positions = torch.arange(num_tokens) % 7 + 2
    slots = torch.tensor([40, 3, -1, 17, 16, 15, 47, 0, -1, 20, 21])
    cache, rotated = guarded(randn(3, 16, width, dtype=dtype, seed=5)), guarded(query.new_zeros(11, 3, width))
    expected_cache = cache.tensor.clone()
    tables = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    expected = reference.write_latent_tokens(query[..., nope:], latent, norm, 1e-6, *tables, slots, expected_cache)
    write_latent_tokens(
        runtime, query, rotated.tensor, latent, norm, 1e-6, cos, sin, positions, slots, cache.tensor
    )  # fmt: skip
    tolerance = 2**-7 if dtype == BF16 else 2**-22
    assert_close(cache.tensor, expected_cache, atol=tolerance, rtol=tolerance)
    assert_close(rotated.tensor[..., latent_size:], expected, atol=tolerance, rtol=tolerance)
    assert bool((rotated.tensor[..., :latent_size] == 0).all())
    cache.assert_bands()
    rotated.assert_bands()


@each("dtype", TOLERANCES)
@each("num_rows", [1, 2, 8, 9, 16, 33])
def test_every_head_has_the_bits_of_its_own_product(runtime: NativeRuntime, num_rows: int, dtype: torch.dtype):
    num_heads, input_size, output_size = 5, 40, 50
    x, weight = randn(num_rows, num_heads, input_size + 8, dtype=dtype), randn(num_heads, 50, 40, dtype=dtype, seed=1)
    packed = torch.zeros(num_heads, *packed_shape(output_size, input_size, dtype), dtype=dtype)
    for head in range(num_heads):
        pack_rows(runtime, weight[head], packed[head], 0)
    out = guarded(x.new_zeros(num_rows, num_heads, output_size + 6))
    head_linear(runtime, x[..., 8:], packed, output_size, out=out.tensor[..., :output_size])
    expected = reference.head_linear_in_order(x[..., 8:], weight).to(dtype)
    assert same_bits(out.tensor[..., :output_size], expected)
    assert bool((out.tensor[..., output_size:] == 0).all())
    out.assert_bands()


WRONG = {
    "a page that the cache lacks": ("block_table", torch.tensor([[7]], dtype=torch.int32)),
    "more tokens than pages": ("seq_lens", torch.tensor([40], dtype=torch.int32)),
    "fewer tokens than queries": ("seq_lens", torch.tensor([0], dtype=torch.int32)),
    "queries of another width": ("query", torch.zeros(1, 4, 62, dtype=BF16)),
    "another dtype": ("latents", torch.zeros(3, 32, 64)),
    "small blocks": ("latents", torch.zeros(3, 8, 64, dtype=BF16)),
}


@each("name, value", WRONG.values())
def test_wrong_steps_are_refused(runtime: NativeRuntime, name: str, value: torch.Tensor):
    step = make_step(((1, 20),), Shape())
    step.block_table = step.block_table[:, :1]
    setattr(step, name, value)
    with pytest.raises(ShapeError):
        step.run(runtime)
