from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.core.kv_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    PoolSize,
)
from quire.errors import UnsupportedError
from quire.kernels.native.runtime import NativeRuntime
from quire.utils.memory import GIB
from quire.worker.device.memory import HostMemory
from quire.worker.kv_cache_tensors import allocate_kv_caches, stored_spec
from tests.unit.scheduler.cache_groups import make_spec
from tests.unit.worker.toy_model import ToyBackend


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_are_zero_aligned_and_take_memory_only_when_written(dtype: torch.dtype) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype_bytes=dtype.itemsize)
    num_blocks = 2 * GIB // (16 * dtype.itemsize)
    config = KVCacheConfig(num_blocks=num_blocks, groups=(KVCacheGroupSpec(layer_names=("a", "b"), spec=spec),))
    before = resident_bytes()
    (first, second), _ = allocate_kv_caches(config, ["b", "a"], ToyBackend(), dtype, HostMemory(GIB).zeros)
    assert first.shape == (num_blocks, 16) and first.dtype == dtype
    assert first.data_ptr() % 64 == 0 and first.data_ptr() != second.data_ptr()
    assert bool((first[:100] == 0).all()) and bool((first[-100:] == 0).all())
    first[5] = 1
    assert bool((second[5] == 0).all())
    assert resident_bytes() - before < GIB // 4


def test_layers_of_different_groups_share_a_tensor_and_layers_of_one_group_do_not() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype_bytes=4)
    groups = tuple(KVCacheGroupSpec(layer_names=names, spec=spec) for names in (("a", "c"), ("b", "d"), ("e",)))
    config = KVCacheConfig(num_blocks=8, groups=groups)
    caches, (pool,) = allocate_kv_caches(config, list("abcde"), ToyBackend(), torch.float32, HostMemory(GIB).zeros)
    assert [cache.data_ptr() == caches[0].data_ptr() for cache in caches] == [True, True, False, False, True]
    assert caches[2].data_ptr() == caches[3].data_ptr()
    assert [cache.data_ptr() for cache in pool.tensors] == [caches[0].data_ptr(), caches[2].data_ptr()]
    assert config.page_size_bytes == 2 * spec.page_size_bytes


@pytest.mark.parametrize("is_native", [False, True], ids=["torch_reference", "native_cpu"])
def test_latents_take_a_row_for_each_token_and_are_copied_block_by_block(is_native: bool) -> None:
    backend = NativeCpuBackend(NativeRuntime()) if is_native else TorchReferenceBackend()
    spec = stored_spec("a", MLAAttentionSpec(block_size=16, head_size=10, dtype_bytes=2), 4)
    config = KVCacheConfig(num_blocks=6, groups=(KVCacheGroupSpec(layer_names=("a", "b"), spec=spec),))
    caches, (pool,) = allocate_kv_caches(config, ["a", "b"], backend, torch.float32, HostMemory(GIB).zeros)
    assert [cache.nbytes for cache in caches] == [6 * spec.page_size_bytes] * 2
    for cache in caches:
        cache.select(pool.dim, 2).fill_(3.0)
    pool.copy(np.array([2]), np.array([5]))
    for cache in caches:
        assert [float(cache.select(pool.dim, block).mean()) for block in range(6)] == [0.0, 0.0, 3.0, 0.0, 0.0, 3.0]


def test_layers_of_each_pool_have_tensors_of_their_own_shape() -> None:
    wide, latent, state = make_spec("full", 0, 16), make_spec("latent", 6, 16), make_spec("state", 20, 16)
    groups = tuple(
        KVCacheGroupSpec(layer_names=(name,), spec=spec, pool=pool)
        for pool, (name, spec) in enumerate((("a", wide), ("l", latent), ("s", state)))
    )
    sizes = tuple(PoolSize(num_blocks=num_blocks) for num_blocks in (8, 5, 3))
    config = KVCacheConfig(num_blocks=16, groups=groups, pools=sizes)
    caches, pools = allocate_kv_caches(
        config, ["l", "s", "a"], TorchReferenceBackend(), torch.bfloat16, HostMemory(GIB).zeros
    )
    assert [cache.numel() for cache in caches] == [5 * 16 * 6, 3 * 128, 2 * 8 * 16]
    assert [cache.dtype for cache in caches] == [torch.bfloat16, torch.uint8, torch.bfloat16]
    assert [(pool.first_id, pool.num_blocks) for pool in pools] == [(0, 8), (8, 5), (13, 3)]


def test_a_layer_that_no_backend_stores_is_refused_by_name() -> None:
    class OwnSpec(AttentionSpec):
        def most_blocks(self, max_chunk_tokens: int) -> int | None:
            return None

        def describe(self) -> str:
            return "something else"

    with pytest.raises(
        UnsupportedError, match=r"layer 'mixer' needs something else (?s:.*)hint: supported types are F"
    ):
        stored_spec("mixer", OwnSpec(block_size=16, num_kv_heads=1, head_size=8, dtype_bytes=2), 4)
    assert stored_spec("layer", make_spec("full", 0, 16), 2).page_size_bytes == 2 * 16 * 2
