"""What writes the pages: rotation with the writing of keys and values, plain writing, and copies of pages."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import copy_pages, reshape_and_cache, rope_and_cache
from quire.kernels.native.elementwise import rms_norm
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import cache as reference
from quire.kernels.reference.rotary import rotary_embedding
from tests.kernels.native.guards import guarded, randn, same_bits
from tests.kernels.native.paged import pack_kv_cache

DTYPES = [torch.bfloat16, torch.float32]
MAX_POSITIONS = 50


def slots_of(num_tokens: int, num_slots: int) -> torch.Tensor:
    """Distinct slots in a shuffled order, every fifth one negative."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(num_tokens))[:num_tokens]
    slots[::5] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 37], ids="{} tokens".format)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotary_dim", "block_size"),
    [(4, 2, 64, 64, 32), (1, 1, 32, 32, 16), (7, 1, 40, 20, 48), (3, 3, 80, 2, 32), (2, 1, 128, 128, 16)],
)
@pytest.mark.parametrize("has_norm", [False, True], ids=["no norm", "norm of heads"])
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33], ids="{} tokens".format)
def test_tokens_land_in_their_slots_and_nowhere_else(runtime: NativeRuntime, num_tokens: int, dtype: torch.dtype):
    fused = randn(num_tokens, 2, 3, 20, dtype=dtype)
    caches = randn(2, 4, 16, 3, 20, dtype=dtype)
    slots, cache = slots_of(num_tokens, 64), guarded(pack_kv_cache(*caches))
    reshape_and_cache(runtime, fused[:, 0], fused[:, 1], cache.tensor, slots)
    reference.reshape_and_cache(fused[:, 0], fused[:, 1], *caches, slots)
    assert same_bits(cache.tensor, pack_kv_cache(*caches))
    cache.assert_bands()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_pages", [0, 1, 5])
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
    for pages in ([3], [-1]):
        with pytest.raises(ShapeError, match="names a page"):
            copy_pages(runtime, cache, torch.tensor([0]), torch.tensor(pages))
    assert bool((cache == 0).all()) and same_bits(key, before)


@pytest.mark.parametrize(
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
        {"k_norm": randn(8, dtype=torch.bfloat16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_impossible_tensors_are_refused(runtime: NativeRuntime, change: dict[str, torch.Tensor]):
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
