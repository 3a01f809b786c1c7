"""Steps over paged caches for the attention tests: made in the plain layout, packed to the native one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.kernels.native.attention import paged_attention
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.attention import paged_attention as reference_attention
from tests.kernels.native.guards import Guarded, guarded


def pack_kv_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    """Two [num_blocks, block_size, num_kv_heads, head_size] to the layout of the native kernels."""
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    pair = 1 if key_cache.dtype == torch.float32 else 2
    keys = key_cache.view(num_blocks, block_size, num_kv_heads, head_size // pair, pair).permute(0, 2, 3, 1, 4)
    values = value_cache.view(num_blocks, block_size // pair, pair, num_kv_heads, head_size).permute(0, 3, 1, 4, 2)
    return torch.stack((keys.flatten(2), values.flatten(2)), dim=2)


@dataclass(frozen=True)
class Shape:
    """What the steps of a test have in common."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Step:
    """Queries over pages. Pages of no request hold NaN, and unwritten slots of a request's last page hold `stale`."""

    shape: Shape
    batch: Sequence[tuple[int, int]]
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, runtime: NativeRuntime) -> torch.Tensor:
        """The kernel's output; asserts that nothing else was written."""
        cache = guarded(pack_kv_cache(self.key_cache, self.value_cache))
        before = cache.tensor.clone()
        out = Guarded(*self.query.shape, dtype=self.query.dtype)
        paged_attention(
            runtime, self.query, cache.tensor, self.block_table, self.query_start_loc, self.seq_lens, 0.17,
            out=out.tensor, **self.options,
        )  # fmt: skip
        cache.assert_bands()
        out.assert_bands()
        assert torch.equal(before.view(torch.uint8), cache.tensor.view(torch.uint8)), "the cache was written"
        return out.tensor.clone()

    def expected(self) -> torch.Tensor:
        """The reference's output, computed in float64."""
        wide = (self.query.double(), self.key_cache.double(), self.value_cache.double())
        return reference_attention(*wide, self.block_table, self.query_start_loc, self.seq_lens, 0.17, **self.options)


def make_step(batch: Sequence[tuple[int, int]], shape: Shape, *, stale: float = 1e4, **options: Any) -> Step:
    """Requests of (query_len, seq_len). A request's numbers depend on its place in the batch and the shape alone."""
    size, heads = shape.block_size, (shape.num_kv_heads, shape.head_size)
    num_pages = [-(-seq_len // size) for _, seq_len in batch]
    num_blocks = sum(num_pages) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    caches = torch.full((2, num_blocks, size, *heads), float("nan"))
    table = torch.full((len(batch), max(num_pages, default=0) + 1), -1, dtype=torch.int32)
    queries = []
    for request, (query_len, seq_len) in enumerate(batch):
        generator = torch.Generator().manual_seed(request)
        pages = [order.pop() for _ in range(num_pages[request])]
        table[request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        numbers = torch.full((2, len(pages) * size, *heads), stale)
        numbers[:, :seq_len] = torch.randn(seq_len, 2, *heads, generator=generator).transpose(0, 1)
        caches[:, pages] = numbers.view(2, len(pages), size, *heads)
        every_query = torch.randn(seq_len, shape.num_heads, shape.head_size, generator=generator)
        queries.append(every_query[seq_len - query_len :])
    empty = torch.empty(0, shape.num_heads, shape.head_size)
    caches = caches.to(shape.dtype)
    return Step(
        shape=shape,
        batch=batch,
        query=torch.cat([*queries, empty]).to(shape.dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        query_start_loc=torch.tensor([0] + [n for n, _ in batch]).cumsum(0).int(),
        seq_lens=torch.tensor([n for _, n in batch], dtype=torch.int32),
        options=options,
    )
