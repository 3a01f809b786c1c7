"""Sparse attention: calls around each layer's attention, and one method that uses them: block-level top-k selection.

`SparseAttention` is the seam: the worker makes one where `sparse_attention_blocks` is set, and the attention backend
calls it. Elsewhere there is none, which costs a test a layer. docs/explanation/sparse-attention.md has UCM's names.

`BlockTopK` follows Quest (Tang et al. 2024, arXiv 2406.10774, section 3): a block of keys is summed up by the smallest
and the largest value of each element; with these no key of the block can have a higher score than the bound. Each token
attends to the blocks with the highest bounds. Unlike Quest it selects for all heads of a layer together, and for the
tokens of a prompt, too: so a token has the same bits whether it was decoded, computed with a prompt or recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata

SCORE_BYTES = 64 << 20
"""Most memory for the bounds of some tokens."""
MIN_BLOCKS = 3
"""The first block, which heads look at whatever is asked, the one before the token's, and the token's own."""

ReadKeys = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(cache of a layer, [n] block numbers) -> their keys, [n, num_kv_heads, block_size, head_size] float32."""


class SparseAttention:
    """Calls of a step; a method overrides what it needs. Steps with it run call by call, without recorded graphs.

    Args:
        block_size: tokens per block of the KV cache.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def attention_begin(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        read_keys: ReadKeys,
        scale: float,
    ) -> AttentionMetadata:
        """The step's keys and values of a layer are in its cache, and its queries are about to attend.

        Args:
            query: [num_tokens, num_heads, head_size], normed and rotated.
            scale: factor on the scores.

        Returns:
            What they attend to: `metadata`, or one of other requests, whose tokens are the same in the same order.
        """
        return metadata

    def attention_finished(self, output: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """The layer's attention has computed `output`, [num_tokens, num_heads, head_size]. Returns what it gives on."""
        return output

    def blocks_changed(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Blocks ([n] int64) of a layer's cache were overwritten by a copy, outside of a step's own writes."""


class BlockTopK(SparseAttention):
    """Each token attends to the blocks whose keys may have the highest scores.

    Args:
        num_blocks: that a token attends to, its own among them; with no more before it, attention is whole.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= MIN_BLOCKS, "checked with the settings"
        super().__init__(block_size)
        self.num_blocks = num_blocks
        self._summaries: dict[int, _Summaries] = {}  # by the address of a layer's cache

    def attention_begin(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        read_keys: ReadKeys,
        scale: float,
    ) -> AttentionMetadata:
        """As `SparseAttention`: every token is a request of its own, with the blocks that it attends to."""
        summaries = self._summaries_of(kv_cache)
        written = torch.unique(metadata.slot_mapping[: metadata.num_tokens] // self.block_size)
        summaries.forget(written)
        if metadata.max_seq_len <= self.num_blocks * self.block_size:
            return metadata
        starts, seq_lens = metadata.query_start_loc_np, metadata.seq_lens_np
        lengths = np.diff(starts[: metadata.num_reqs + 1])
        tables = np.zeros((metadata.num_tokens, self.num_blocks), dtype=np.int32)
        lens = np.empty(metadata.num_tokens, dtype=np.int32)
        for request, length in enumerate(lengths.tolist()):
            first, table = int(starts[request]), metadata.block_table[request]
            tokens = slice(first, first + length)
            # tokens that each query sees, itself included
            seen = int(seq_lens[request]) - length + 1 + np.arange(length)
            num_full = (int(seq_lens[request]) - 1) // self.block_size
            if num_full:
                summaries.update(table[:num_full].long(), read_keys, kv_cache)
            tables[tokens], lens[tokens] = self._select(query[tokens], table, seen, summaries, scale)
        each = np.arange(metadata.num_tokens + 1, dtype=np.int32)
        return dataclasses.replace(
            metadata, num_reqs=metadata.num_tokens, query_start_loc_np=each, query_start_loc=torch.from_numpy(each),
            seq_lens_np=lens, seq_lens=torch.from_numpy(lens), block_table=torch.from_numpy(tables), max_query_len=1,
            max_seq_len=int(lens.max()),
        )  # fmt: skip

    def _select(
        self, query: torch.Tensor, table: torch.Tensor, seen: np.ndarray, summaries: _Summaries, scale: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Per token of a request: its blocks in order, [num_tokens, num_blocks] int32, and the tokens in them."""
        size, most = self.block_size, self.num_blocks
        own = (seen - 1) // size  # the block of each token
        chosen = np.zeros((len(seen), most), dtype=np.int32)
        lens = seen.astype(np.int32)
        blocks = table.numpy()
        whole = own < most
        chosen[whole] = blocks[:most]
        sparse = np.flatnonzero(~whole)
        if not len(sparse):
            return chosen, lens
        num_before = int(own.max())
        low, high = summaries.of(table[:num_before].long())
        step = max(1, SCORE_BYTES // (4 * num_before * query.shape[1] * query.shape[2]))
        for at in range(0, len(sparse), step):
            places = sparse[at : at + step]
            bounds = _bounds(query[places].float() * scale, low, high)
            order = np.arange(num_before)
            bounds[torch.from_numpy(order >= own[places, None])] = float("-inf")  # not before the token's block
            bounds[:, 0] = float("inf")
            bounds[np.arange(len(places)), own[places] - 1] = float("inf")
            best = torch.sort(bounds, dim=1, descending=True, stable=True).indices[:, : most - 1]
            kept = np.concatenate([np.sort(best.numpy(), axis=1), own[places, None]], axis=1)
            chosen[places] = blocks[kept]
            lens[places] = (most - 1) * size + (seen[places] - 1) % size + 1
        return chosen, lens

    def blocks_changed(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """As `SparseAttention`."""
        self._summaries_of(kv_cache).forget(block_ids)

    def _summaries_of(self, kv_cache: torch.Tensor) -> _Summaries:
        return self._summaries.setdefault(kv_cache.data_ptr(), _Summaries())


class _Summaries:
    """Smallest and largest elements of the keys of full blocks of one layer, as far as they are known."""

    def __init__(self) -> None:
        self._low = self._high = torch.empty(0)  # [num_blocks, num_kv_heads, head_size] float32
        self._is_known = torch.zeros(0, dtype=torch.bool)

    def forget(self, block_ids: torch.Tensor) -> None:
        """These have other keys from now on."""
        self._is_known[block_ids[block_ids < len(self._is_known)]] = False

    def update(self, block_ids: torch.Tensor, read_keys: ReadKeys, kv_cache: torch.Tensor) -> None:
        """Sum up those that are full and not known."""
        self._grow(int(block_ids.max()) + 1)
        new = block_ids[~self._is_known[block_ids]]
        if not len(new):
            return
        keys = read_keys(kv_cache, new)
        if not len(self._low) or self._low.shape[1:] != (keys.shape[1], keys.shape[3]):
            self._low = torch.zeros(len(self._is_known), keys.shape[1], keys.shape[3])
            self._high = torch.zeros_like(self._low)
        self._low[new], self._high[new] = keys.amin(2), keys.amax(2)
        self._is_known[new] = True

    def _grow(self, num_blocks: int) -> None:
        if num_blocks <= len(self._is_known):
            return
        more = max(num_blocks, 2 * len(self._is_known)) - len(self._is_known)
        self._is_known = torch.cat([self._is_known, torch.zeros(more, dtype=torch.bool)])
        if len(self._low):
            self._low, self._high = (
                torch.cat([part, torch.zeros(more, *part.shape[1:])]) for part in (self._low, self._high)
            )

    def of(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, num_kv_heads, head_size] each."""
        return self._low[block_ids], self._high[block_ids]


def _bounds(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What no score of a block exceeds, the highest of all heads: [num_tokens, num_blocks] float32.

    Sums go in one order whatever the number of tokens and blocks: halves are added to halves, element by element.
    """
    num_tokens, num_kv_heads = len(query), low.shape[1]
    grouped = query.view(num_tokens, 1, num_kv_heads, -1, query.shape[2])
    terms = torch.maximum(grouped * low[None, :, :, None], grouped * high[None, :, :, None])
    while terms.shape[-1] > 1:
        half, rest = terms.shape[-1] // 2, terms.shape[-1] % 2
        summed = terms[..., :half] + terms[..., half : 2 * half]
        terms = torch.cat([summed, terms[..., -1:]], dim=-1) if rest else summed
    return terms[..., 0].amax(dim=(2, 3))
