"""Attention in plain torch operations: runs on any device, and is what native kernels are compared with.

Made by `attention.selector`, called by every attention layer. Owns two scratch buffers and the plan of the step
that is running.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.block_sizes import PREFERRED_BLOCK_SIZES
from quire.attention.decode_tiles import DecodeTile, plan_decode_tiles
from quire.attention.latent import LatentBackend, ServesLatents
from quire.attention.latent_torch import TorchLatentBackend
from quire.attention.logits import attend_by_logits, has_plain_logits
from quire.attention.metadata import AttentionMetadata

# Gathered keys and values of one decode tile, and the score mask of one run of prompt tokens, in bytes.
MAX_TILE_BYTES = 16 << 20
MAX_MASK_BYTES = 16 << 20
MAX_PLANS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """How one step is computed by the layers of one kind: tiles of decodes, and the other requests one by one."""

    metadata: AttentionMetadata
    tiles: list[DecodeTile]
    prompts: list[int]


class TorchReferenceBackend(AttentionBackend, ServesLatents):
    """Any mix of decodes and prompt chunks, and every kind of layer that `AttentionParams` describes.

    A tile of decodes is one gather of its blocks and one masked attention call; prompt chunks are looped over.
    """

    name = "torch_reference"
    preferred_block_size = PREFERRED_BLOCK_SIZES[name]

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], _StepPlan] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    @staticmethod
    def unsupported_reasons(params: AttentionParams, dtype: torch.dtype, device: torch.device) -> list[str]:
        """It serves every device and head size, in the three floating types of checkpoints."""
        return [] if dtype in DTYPES else [f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}"]

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """[keys or values, block, token of the block, head, element]."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def latent_backend(self) -> LatentBackend:
        """In torch, too."""
        return TorchLatentBackend()

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values to their slots, then attend causally over each request's blocks.

        Rows of `query` past `metadata.num_tokens` are padding and come back as zeros.
        """
        num_tokens = metadata.num_tokens
        slots = metadata.slot_mapping[:num_tokens]
        for cache, new in zip(kv_cache, (key, value), strict=True):
            if new is not None:
                cache.flatten(0, 1).index_copy_(0, slots, new[:num_tokens])
        if metadata.copied_slots is not None:
            self.copy_slots(kv_cache, kv_cache.shape[2], metadata.copied_slots)
        if self.sparse is not None:
            metadata = self.select_blocks(params, query, kv_cache, metadata)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        output[num_tokens:] = 0
        plan = self._plan(params, metadata, kv_cache)
        for tile in plan.tiles:
            self._attend_tile(params, tile, query, kv_cache, sinks, output)
        for request in plan.prompts:
            self._attend_prompt(params, metadata, request, query, (key, value), kv_cache, sinks, output)
        return output if self.sparse is None else self.sparse.attention_finished(output, kv_cache)

    def _plan(self, params: AttentionParams, metadata: AttentionMetadata, kv_cache: torch.Tensor) -> _StepPlan:
        """The step's plan, made by its first layer of each kind."""
        page_bytes = 2 * kv_cache[0, 0].numel() * kv_cache.element_size()
        key = (id(metadata), params.sliding_window, params.chunk, kv_cache.shape[2], page_bytes, kv_cache.dtype)
        found = self._plans.get(key)
        if found is not None:
            return found
        query_lens = np.diff(metadata.query_start_loc_np[: metadata.num_reqs + 1])
        tiles = plan_decode_tiles(
            metadata,
            np.flatnonzero(query_lens == 1),
            block_size=kv_cache.shape[2],
            params=params,
            max_tile_pages=MAX_TILE_BYTES // page_bytes,
            dtype=kv_cache.dtype,
        )
        plan = _StepPlan(metadata=metadata, tiles=tiles, prompts=np.flatnonzero(query_lens > 1).tolist())
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _attend_tile(
        self,
        params: AttentionParams,
        tile: DecodeTile,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        sinks: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """The query heads of a group are laid out as the rows of one small attention over their key head."""
        queries = query.index_select(0, tile.query_rows).view(tile.num_reqs, params.num_kv_heads, -1, params.head_size)
        keys, values = (self._gather(part, kv_cache[i], tile) for i, part in enumerate(("keys", "values")))
        if has_plain_logits(params, sinks):
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=tile.mask, scale=params.scale)
        else:
            query_rows, keys, values = queries.unsqueeze(3), keys.unsqueeze(2), values.unsqueeze(2)
            is_seen, distances = (tile.mask == 0).unsqueeze(1), tile.distances.unsqueeze(1)
            attended = attend_by_logits(params, query_rows, keys, values, is_seen, distances, sinks)
        output.index_copy_(0, tile.query_rows, attended.reshape(tile.num_reqs, params.num_heads, params.head_size))

    def _gather(self, part: str, cache: torch.Tensor, tile: DecodeTile) -> torch.Tensor:
        """The tile's tokens, [num_reqs, num_kv_heads, num_keys, head_size], copied into a scratch buffer.

        The buffer is kept because fresh memory costs more than the copy. Tokens that the request did not write are
        zeroed: the mask alone would let their NaNs through.
        """
        blocks = self._copy_blocks(part, cache, tile.block_ids)
        blocks.flatten(0, 1).index_fill_(0, tile.unwritten, 0)
        return blocks.view(tile.num_reqs, -1, *cache.shape[2:]).transpose(1, 2)

    def _copy_blocks(self, part: str, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        shape = (len(block_ids), *cache.shape[1:])
        num_elements = int(np.prod(shape))
        scratch = self._scratch.get(part)
        if scratch is None or scratch.numel() < num_elements or scratch.dtype != cache.dtype:
            scratch = torch.empty(num_elements, dtype=cache.dtype, device=cache.device)
            self._scratch[part] = scratch
        return torch.index_select(cache, 0, block_ids, out=scratch[:num_elements].view(shape))

    def _attend_prompt(
        self,
        params: AttentionParams,
        metadata: AttentionMetadata,
        request: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor | None, torch.Tensor | None],
        kv_cache: torch.Tensor,
        sinks: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Several query tokens of one request, over keys that are in this step alone (`new`) or in blocks too."""
        start, end = (int(row) for row in metadata.query_start_loc_np[request : request + 2])
        num_cached = int(metadata.seq_lens_np[request]) - (end - start)
        key, value = new
        if num_cached == 0 and key is not None and value is not None:
            keys, values, first_key = key[start:end], value[start:end], 0
        else:
            block_size = kv_cache.shape[2]
            first_block = max(0, params.oldest_seen(num_cached)) // block_size
            num_blocks = -(-(num_cached + end - start) // block_size)
            block_ids = metadata.block_table[request, first_block:num_blocks]
            first_key = first_block * block_size
            keys, values = (cache.index_select(0, block_ids).flatten(0, 1) for cache in kv_cache)
        attend_causally(params, query[start:end], keys, values, num_cached, first_key, sinks, output[start:end])


def attend_causally(
    params: AttentionParams,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    first_key: int,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Attention of consecutive tokens of one request, in runs short enough to bound the mask.

    Args:
        query: [query_len, num_heads, head_size], tokens at first_position and on.
        keys, values: [num_keys, num_kv_heads, head_size], tokens at first_key and on; may run past the last query.
        sinks: [num_heads], or None.
        output: [query_len, num_heads, head_size]; written.
    """
    query_len, is_plain = query.shape[0], has_plain_logits(params, sinks)
    if first_position == 0 and is_plain and params.oldest_seen(query_len - 1) <= 0:
        output.copy_(_attend(params, query, keys[:query_len], values[:query_len], mask=None))
        return
    run = max(16, MAX_MASK_BYTES // (4 * keys.shape[0] * (1 if is_plain else params.num_heads)))
    seen_at_once = params.sliding_window or params.chunk
    if seen_at_once is not None:
        run = min(run, max(64, seen_at_once))
    for start in range(0, query_len, run):
        end = min(start + run, query_len)
        positions = torch.arange(first_position + start, first_position + end, device=query.device)
        oldest = max(0, params.oldest_seen(first_position + start))
        seen = slice(max(0, oldest - first_key), first_position + end - first_key)
        key_positions = torch.arange(first_key + seen.start, first_key + seen.stop, device=query.device)
        mask = (key_positions <= positions[:, None]) & (key_positions >= params.oldest_seen(positions)[:, None])
        if is_plain:
            output[start:end] = _attend(params, query[start:end], keys[seen], values[seen], mask)
            continue
        queries, seen_keys, seen_values = (
            x.transpose(0, 1).view(params.num_kv_heads, -1, len(x), params.head_size)
            for x in (query[start:end], keys[seen], values[seen])
        )
        distances = key_positions - positions[:, None]
        attended = attend_by_logits(params, queries, seen_keys, seen_values, mask, distances, sinks)
        output[start:end] = attended.flatten(0, 1).transpose(0, 1)


def _attend(
    params: AttentionParams, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One request's attention, [query_len, num_heads, head_size]; without a mask it is causal."""
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=params.scale,
        enable_gqa=params.num_heads != params.num_kv_heads,
    )
    return attended.squeeze(0).transpose(0, 1)
