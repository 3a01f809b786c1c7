"""What writes the pages: rotation with the writing of keys and values, plain writing, and copies of pages."""

from __future__ import annotations

import pytest
import torch

from quire.attention.backend import HeadNorms, Rotation, prepare_heads
from quire.errors import ShapeError
from quire.kernels.native.attention import copy_pages, reshape_and_cache, rope_and_cache
from quire.kernels.native.elementwise import rms_norm
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import cache as reference
from quire.kernels.reference.rotary import rotary_embedding
from tests.each import each
from tests.kernels.native.guards import guarded, randn, same_bits
from tests.kernels.native.paged import pack_kv_cache

DTYPES = [torch.bfloat16, torch.float32]
MAX_POSITIONS = 50


def slots_of(num_tokens: int, num_slots: int) -> torch.Tensor:
    """Distinct slots in a shuffled order, every fifth one negative."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(num_tokens))[:num_tokens]
    slots[::5] = -1
    return slots


@each("dtype", DTYPES)
@each("num_tokens", [0, 1, 8, 37])
@each(
    ("num_heads", "num_kv_heads", "head_size", "rotary_dim", "block_size"),
    [(4, 2, 64, 64, 32), (1, 1, 32, 32, 16), (7, 1, 40, 20, 48), (3, 3, 80, 2, 32), (2, 1, 128, 128, 16)],
)
@each("has_norm", [False, True])
def test_rope_and_cache_has_the_bits_of_its_parts(
    runtime: NativeRuntime, num_tokens, num_heads, num_kv_heads, head_size, rotary_dim, block_size, has_norm, dtype
):
    num_all = num_heads + 2 * num_kv_heads
    wide = guarded(randn(num_tokens, num_all * head_size + 6, dtype=dtype))
    qkv = wide.tensor[:, : num_all * head_size]
    given = wide.tensor.clone()
    angles = randn(MAX_POSITIONS, rotary_dim // 2)
    positions = torch.randint(MAX_POSITIONS, (num_tokens,), generator=torch.Generator().manual_seed(1))
    positions = positions.int() if num_tokens == 8 else positions
    slots = slots_of(num_tokens, 3 * block_size)
    norms = [randn(head_size, dtype=dtype, seed=i) if has_norm else None for i in range(2)]
    caches = randn(2, 3, block_size, num_kv_heads, head_size, dtype=dtype)
    cache = guarded(pack_kv_cache(*caches))
    rope_and_cache(
        runtime, qkv, num_heads, num_kv_heads, head_size, angles.cos(), angles.sin(), positions, slots, cache.tensor,
        block_size, *norms, eps=1e-5,
    )  # fmt: skip

    heads = given[:, : num_all * head_size].unflatten(1, (num_all, head_size))
    split = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rotated = []
    for part, norm in zip(split[:2], norms, strict=True):
        if norm is not None:
            rows = rms_norm(runtime, part.reshape(-1, head_size), norm, 1e-5)
            part = rows.view(part.shape)
        turn = angles[positions.long()].unsqueeze(1)
        rotated.append(rotary_embedding(part, turn.cos(), turn.sin()))
    expected = given.clone()
    expected[:, : num_heads * head_size] = rotated[0].flatten(1)
    reference.reshape_and_cache(rotated[1], split[2], *caches, slots)
    assert same_bits(wide.tensor, expected)
    assert same_bits(cache.tensor, pack_kv_cache(*caches))
    wide.assert_bands()
    cache.assert_bands()


# What a layer does besides rotating: the arguments of `rope_and_cache`, and of `HeadNorms` and `Rotation`.
WAYS = {
    "no rotation": {"rotates": False},
    "norms of all heads as one": {"norm": "whole"},
    "norms after the rotation": {"norm": "last"},
    "a norm of values": {"norm": "heads", "has_value_norm": True},
    "factors on queries": {"has_scales": True},
    "factors on queries alone": {"rotates": False, "has_scales": True},
    "queries alone": {"has_kv": False, "norm": "heads"},
    "layer norms with gains of every head": {"norm": "centered"},
    "limits": {"limit": 0.7},
    "limits after norms": {"norm": "whole", "has_value_norm": True, "limit": 0.7},
    "limits without rotation": {"rotates": False, "limit": 0.7},
}


@each("dtype", DTYPES)
@each("head_size", [20, 512])
@each("way", WAYS)
def test_every_way_to_prepare_heads_equals_the_plain_one_with_the_bits_of_every_tier(
    runtime: NativeRuntime, way: str, head_size: int, dtype: torch.dtype
):
    prepared = prepare(runtime, head_size, dtype, **WAYS[way])
    for got, tier, plain in zip(
        prepared, prepare(NativeRuntime("portable"), head_size, dtype, **WAYS[way]),
        prepare(None, head_size, dtype, **WAYS[way]), strict=True,
    ):  # fmt: skip
        assert same_bits(got, tier)
        # Sums in another order may round the last place of an element differently, twice.
        assert torch.allclose(got.float(), plain.float(), rtol=2**-6 if dtype is torch.bfloat16 else 2e-6, atol=1e-6)


def prepare(
    runtime: NativeRuntime | None,
    head_size: int,
    dtype: torch.dtype,
    *,
    rotates: bool = True,
    norm: str | None = None,
    has_value_norm: bool = False,
    has_scales: bool = False,
    has_kv: bool = True,
    limit: float = 0.0,
) -> list[torch.Tensor]:
    """Queries, and pages of keys and values, by the kernel or (without a runtime) by the interface's own torch code."""
    heads, kv_heads, tokens, block_size = 3, 2, 11, 16
    num_all = heads + (2 * kv_heads if has_kv else 0)
    qkv = randn(tokens, num_all * head_size, dtype=dtype)
    angles = randn(MAX_POSITIONS, 4 if rotates else 0)
    positions = torch.arange(tokens) * 3
    scales = randn(MAX_POSITIONS, seed=4) if has_scales else None
    rotation = Rotation(angles.cos(), angles.sin(), positions, scales) if rotates or has_scales else None
    has_own_gains = norm in ("whole", "centered")
    sizes = (heads * head_size, kv_heads * head_size) if has_own_gains else (head_size, head_size)
    gains = [randn(size, dtype=dtype, seed=i) for i, size in enumerate(sizes)] if norm else [None, None]
    value_gains = randn(head_size, dtype=dtype, seed=3) if has_value_norm else None
    slots = torch.randperm(2 * block_size, generator=torch.Generator().manual_seed(0))[:tokens]
    caches = torch.zeros(2, 2, block_size, kv_heads, head_size, dtype=dtype)
    if runtime is None:
        norms = HeadNorms(*gains, 1e-5, value_gains, norm == "last", norm == "centered") if norm else None
        query, *new = qkv.unflatten(1, (num_all, head_size)).split((heads, kv_heads, kv_heads)[: 3 if has_kv else 1], 1)
        query = prepare_heads(query, rotation, norms, is_query=True, limit=limit)
        if has_kv:
            key = prepare_heads(new[0], rotation, norms, is_query=False, limit=limit)
            value = new[1] if norms is None or value_gains is None else norms.norm(new[1], value_gains)
            value = value.clamp(-limit, limit) if limit else value
            reference.reshape_and_cache(key, value, *caches, slots)
        return [query.flatten(1), pack_kv_cache(*caches)]
    cache = guarded(pack_kv_cache(*caches))
    cos, sin = (angles.cos(), angles.sin()) if rotation else (None, None)
    rope_and_cache(
        runtime, qkv, heads, kv_heads, head_size, cos, sin, positions if rotation else None, slots if has_kv else None,
        cache.tensor, block_size, *gains, 1e-5, v_norm=value_gains, norms_last=norm == "last", query_scales=scales,
        norms_centered=norm == "centered", limit=limit,
    )  # fmt: skip
    cache.assert_bands()
    return [qkv[:, : heads * head_size], cache.tensor]


@each("dtype", DTYPES)
@each("num_tokens", [0, 1, 7, 33])
def test_tokens_land_in_their_slots_and_nowhere_else(runtime: NativeRuntime, num_tokens: int, dtype: torch.dtype):
    fused = randn(num_tokens, 2, 3, 20, dtype=dtype)
    caches = randn(2, 4, 16, 3, 20, dtype=dtype)
    slots, cache = slots_of(num_tokens, 64), guarded(pack_kv_cache(*caches))
    reshape_and_cache(runtime, fused[:, 0], fused[:, 1], cache.tensor, slots)
    reference.reshape_and_cache(fused[:, 0], fused[:, 1], *caches, slots)
    assert same_bits(cache.tensor, pack_kv_cache(*caches))
    cache.assert_bands()


@each("dtype", DTYPES)
@each("num_pages", [0, 1, 5])
def test_pages_are_copied_whole(runtime: NativeRuntime, num_pages: int, dtype: torch.dtype):
    cache = guarded(randn(12, 3, 2, 16 * 6, dtype=dtype))
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    sources, targets = pages[:num_pages], pages[6 : 6 + num_pages]
    expected = cache.tensor.clone()
    reference.copy_pages(expected, sources, targets)
    copy_pages(runtime, cache.tensor, sources, targets)
    assert same_bits(cache.tensor, expected)
    cache.assert_bands()


def test_indices_out_of_the_cache_are_refused(runtime: NativeRuntime):
    cache, key, table = torch.zeros(3, 1, 2, 16 * 8), randn(2, 1, 8), torch.ones(5, 4)
    before = key.clone()
    with pytest.raises(ShapeError, match="past the end of the cache"):
        reshape_and_cache(runtime, key, key, cache, torch.tensor([0, 48]))
    for positions, slots, match in (
        ([0, 5], [0, 1], "positions"),
        ([-1, 0], [0, 1], "positions"),
        ([0, 0], [0, 99], "slot"),
    ):
        with pytest.raises(ShapeError, match=match):
            rope_and_cache(
                runtime, key.repeat(1, 3, 1).flatten(1), 1, 1, 8, table, table, torch.tensor(positions),
                torch.tensor(slots), cache, 16,
            )  # fmt: skip
    shared = torch.zeros(2, 24)
    with pytest.raises(ShapeError, match="overlap"):  # also where nothing is rotated, so that no position is read
        rope_and_cache(
            runtime, shared, 1, 1, 8, table[:, :0], table[:, :0], shared[0, :4].view(torch.int64),
            torch.tensor([0, 1]), cache, 16, limit=1.0,
        )  # fmt: skip
    for pages in ([3], [-1]):
        with pytest.raises(ShapeError, match="names a page"):
            copy_pages(runtime, cache, torch.tensor([0]), torch.tensor(pages))
    for sources, targets in (([0, 0], [1, 1]), ([0, 1], [1, 2]), ([0], [0])):
        with pytest.raises(ShapeError, match="dst_ids names a page"):
            copy_pages(runtime, cache, torch.tensor(sources), torch.tensor(targets))
    assert bool((cache == 0).all()) and same_bits(key, before)


@each(
    "change",
    [
        {"qkv": randn(2, 4 * 8)},
        {"cos": randn(5, 5)},
        {"sin": randn(5, 3)},
        {"cos": randn(5, 4, dtype=torch.bfloat16)},
        {"positions": torch.zeros(3, dtype=torch.int64)},
        {"slot_mapping": torch.zeros(2, dtype=torch.int32)},
        {"kv_cache": torch.zeros(3, 2, 2, 16 * 8)},
        {"kv_cache": torch.zeros(3, 1, 2, 32 * 8)},
        {"q_norm": randn(7)},
        {"q_norm": randn(16)},
        {"v_norm": randn(7)},
        {"query_scales": randn(4)},
        {"positions": None},
        {"sin": None},
        {"slot_mapping": None},
        {"k_norm": randn(8, dtype=torch.bfloat16)},
        {"norms_centered": True, "q_norm": randn(16)},
        {"norms_centered": True, "norms_last": True},
    ],
)
def test_impossible_tensors_are_refused(runtime: NativeRuntime, change: dict[str, torch.Tensor | None]):
    given = {
        "qkv": randn(2, 3 * 8),
        "cos": randn(5, 4),
        "sin": randn(5, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "kv_cache": torch.zeros(3, 1, 2, 16 * 8),
    }
    with pytest.raises(ShapeError):
        rope_and_cache(runtime, num_heads=1, num_kv_heads=1, head_size=8, block_size=16, **{**given, **change})
