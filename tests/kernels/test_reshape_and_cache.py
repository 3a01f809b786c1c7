"""Every implementation of writing keys and values to pages: right slots, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.reference.cache import reshape_and_cache

IMPLEMENTATIONS = {"reference": reshape_and_cache}
GUARD = 7.5


@pytest.mark.parametrize("write", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16, 31], ids="{} tokens".format)
def test_tokens_land_in_their_slots_and_nowhere_else(write, dtype: torch.dtype, num_tokens: int):
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, num_tokens, 3, 5, generator=generator).to(dtype)
    caches = [torch.full((9, 4, 3, 5), GUARD, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(36, generator=generator)[:num_tokens]
    slots[::5] = -1
    given = key.clone(), value.clone(), slots.clone()
    write(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        flat, written = cache.flatten(0, 1), torch.zeros(36, dtype=torch.bool)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[slot], new[token])
                written[slot] = True
        assert (flat[~written] == GUARD).all()
    assert all(torch.equal(a, b) for a, b in zip(given, (key, value, slots), strict=True))


def test_strided_inputs_are_read_by_their_strides():
    fused = torch.randn(5, 2, 3, 4).transpose(0, 1)
    caches = torch.zeros(2, 2, 4, 3, 4)
    reshape_and_cache(fused[0], fused[1], caches[0], caches[1], torch.arange(5))
    assert torch.equal(caches.flatten(1, 2)[:, :5], fused)


def test_a_wrong_shape_is_refused_by_name():
    key, cache = torch.zeros(3, 2, 4), torch.zeros(2, 4, 2, 4)
    with pytest.raises(ShapeError, match="slot_mapping has shape"):
        reshape_and_cache(key, key, cache, cache, torch.arange(4))
    with pytest.raises(ShapeError, match="value_cache has shape"):
        reshape_and_cache(key, key, cache, torch.zeros(2, 4, 2, 8), torch.arange(3))
