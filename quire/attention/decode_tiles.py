"""Groups a step's decoding requests into tiles: batches of equal shape, each attended to in a few large operations.

Called by attention backends once per step and kind of layer. Values only; no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.backend import AttentionParams
from quire.attention.metadata import AttentionMetadata

# Requests of up to this many blocks share a tile whatever their lengths: one more tile costs more than the padding.
SHORT_PAGES = 8


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Requests with one query token each, padded to the same number of blocks by repeating the last one.

    Attributes:
        query_rows: [num_reqs] int64; their rows in the step's query tensor.
        block_ids: [num_reqs * num_pages] int64; blocks to gather, request by request.
        unwritten: [.] int64; gathered tokens that are no token of their request, so may hold anything.
        mask: [num_reqs, 1, 1, num_pages * block_size]; 0 where the query sees the token, else -inf.
        distances: [num_reqs, 1, 1, num_pages * block_size] float32; key position - query position.
    """

    num_reqs: int
    num_blocks: int
    query_rows: torch.Tensor
    block_ids: torch.Tensor
    unwritten: torch.Tensor
    mask: torch.Tensor
    distances: torch.Tensor


def plan_decode_tiles(
    metadata: AttentionMetadata,
    requests: np.ndarray,
    *,
    block_size: int,
    params: AttentionParams,
    max_tile_pages: int,
    dtype: torch.dtype,
) -> list[DecodeTile]:
    """Divide `requests`, each with one query token, into tiles of at most `max_tile_pages` pages (or one request).

    Only blocks with a token that the query sees are gathered.

    Args:
        requests: [.] indices into the metadata's requests.
        params: of the layer; only what a query sees matters.
        dtype: of the masks.
    """
    seq_lens = metadata.seq_lens_np[requests].astype(np.int64)
    oldest_seen = np.maximum(params.oldest_seen(seq_lens - 1), 0)
    first_blocks = oldest_seen // block_size
    num_blocks = -(-seq_lens // block_size) - first_blocks
    tiles = []
    for members in _tile_members(num_blocks, max_tile_pages):
        tile_pages = int(num_blocks[members[0]])
        last_blocks = first_blocks[members] + num_blocks[members] - 1
        columns = np.minimum(first_blocks[members, None] + np.arange(tile_pages), last_blocks[:, None])
        positions = first_blocks[members, None] * block_size + np.arange(tile_pages * block_size)
        is_written = positions < seq_lens[members, None]
        is_seen = is_written & (positions >= oldest_seen[members, None])
        distances = positions - seq_lens[members, None] + 1
        tiles.append(_make_tile(metadata, requests[members], columns, is_written, is_seen, distances, dtype))
    return tiles


def _tile_members(num_blocks: np.ndarray, max_tile_pages: int) -> list[np.ndarray]:
    """Indices of each tile's requests, longest first; a member fills half of its tile's blocks, or is short."""
    order = np.argsort(-num_blocks, kind="stable")
    tiles, start = [], 0
    while start < len(order):
        tile_pages = int(num_blocks[order[start]])
        end = start + max(1, min(max_tile_pages // tile_pages, len(order) - start))
        if tile_pages > SHORT_PAGES:
            is_long_enough = num_blocks[order[start:end]] * 2 >= tile_pages
            end = start + int(is_long_enough.sum())
        tiles.append(order[start:end])
        start = end
    return tiles


def _make_tile(
    metadata: AttentionMetadata,
    requests: np.ndarray,
    columns: np.ndarray,
    is_written: np.ndarray,
    is_seen: np.ndarray,
    distances: np.ndarray,
    dtype: torch.dtype,
) -> DecodeTile:
    device = metadata.block_table.device
    num_reqs, num_blocks = columns.shape
    rows = torch.from_numpy(requests.astype(np.int64)).to(device)
    block_ids = metadata.block_table.index_select(0, rows).long().gather(1, torch.from_numpy(columns).to(device))
    mask = torch.from_numpy(np.where(is_seen, np.float32(0.0), np.float32(-np.inf)))
    return DecodeTile(
        num_reqs=num_reqs,
        num_blocks=num_blocks,
        query_rows=torch.from_numpy(metadata.query_start_loc_np[requests].astype(np.int64)).to(device),
        block_ids=block_ids.flatten(),
        unwritten=torch.from_numpy(np.flatnonzero(~is_written)).to(device),
        mask=mask.to(device=device, dtype=dtype).view(num_reqs, 1, 1, -1),
        distances=torch.from_numpy(distances.astype(np.float32)).to(device).view(num_reqs, 1, 1, -1),
    )
