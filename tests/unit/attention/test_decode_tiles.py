"""Tiles cover every decoding request once, within their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.backend import AttentionParams
from quire.attention.decode_tiles import SHORT_PAGES, plan_decode_tiles
from tests.models.stepping import make_metadata


def params_of(**options: Any) -> AttentionParams:
    return AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, **options)


@settings(deadline=None, max_examples=200)
@given(
    seq_lens=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 60),
    chunk=st.none() | st.integers(1, 60),
    max_tile_pages=st.integers(0, 100),
)
def test_every_request_is_in_one_tile_that_sees_exactly_its_window_or_chunk(
    seq_lens: list[int], block_size: int, window: int | None, chunk: int | None, max_tile_pages: int
):
    blocks = [[100 * i + j for j in range(-(-n // block_size))] for i, n in enumerate(seq_lens)]
    metadata = make_metadata([1] * len(seq_lens), seq_lens, blocks, block_size)
    tiles = plan_decode_tiles(
        metadata,
        np.arange(len(seq_lens)),
        block_size=block_size,
        params=params_of(sliding_window=None if chunk else window, chunk=chunk),
        max_tile_pages=max_tile_pages,
        dtype=torch.float32,
    )
    assert sorted(torch.cat([tile.query_rows for tile in tiles]).tolist()) == list(range(len(seq_lens)))
    for tile in tiles:
        assert tile.num_reqs == 1 or tile.num_reqs * tile.num_blocks <= max_tile_pages
        ids = tile.block_ids.view(tile.num_reqs, tile.num_blocks)
        sees = (tile.mask.view(tile.num_reqs, -1) == 0).numpy()
        is_unwritten = np.zeros(sees.size, dtype=bool)
        is_unwritten[tile.unwritten.numpy()] = True
        for row, request in enumerate(tile.query_rows.tolist()):
            seq_len = seq_lens[request]
            first = int(ids[row, 0]) - 100 * request
            seen = first * block_size + np.flatnonzero(sees[row])
            oldest = (seq_len - 1) // chunk * chunk if chunk else max(0, seq_len - (window or seq_len))
            assert seen.tolist() == list(range(oldest, seq_len))
            assert tile.distances[row].flatten()[torch.from_numpy(sees[row])].tolist() == (seen - seq_len + 1).tolist()
            assert all(100 * request <= block < 100 * request + len(blocks[request]) for block in ids[row].tolist())
            written = first * block_size + np.flatnonzero(~is_unwritten.reshape(sees.shape)[row])
            assert written.tolist() == list(range(first * block_size, seq_len))


def test_a_short_request_does_not_pay_for_a_long_one():
    seq_lens = [4 * 100, 4 * 51, 4 * 49, 4 * SHORT_PAGES, 1]
    metadata = make_metadata([1] * 5, seq_lens, [list(range(-(-n // 4))) for n in seq_lens], 4)
    tiles = plan_decode_tiles(
        metadata, np.arange(5), block_size=4, params=params_of(), max_tile_pages=10**6, dtype=torch.float32
    )
    assert [tile.query_rows.tolist() for tile in tiles] == [[0, 1], [2], [3, 4]]
