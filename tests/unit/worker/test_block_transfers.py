"""Blocks go to the swap space and back unchanged, in every layout, and outs come before ins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.backend import AttentionBackend
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, PoolSize
from quire.core.scheduler_output import NO_BLOCK_COPIES, BlockCopies, SchedulerOutput
from quire.kernels.native.runtime import NativeRuntime
from quire.utils.memory import GIB
from quire.worker.block_transfers import BlockTransfers, DeviceTransfers
from quire.worker.device.memory import HostMemory
from quire.worker.kv_cache_tensors import CachePool, allocate_kv_caches
from quire.worker.kv_tier import CacheBlocks

NUM_BLOCKS, NUM_SWAP_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 9, 6, 16, 2, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def config_of(dtype: torch.dtype) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype_bytes=dtype.itemsize)
    group = KVCacheGroupSpec(layer_names=("a", "b"), spec=spec)
    return KVCacheConfig(num_blocks=NUM_BLOCKS, groups=(group,), num_swap_blocks=NUM_SWAP_BLOCKS)


def make_backend(name: str) -> AttentionBackend:
    return TorchReferenceBackend() if name == "torch_reference" else NativeCpuBackend(NativeRuntime("auto", 1))


def step(outs: BlockCopies = NO_BLOCK_COPIES, ins: BlockCopies = NO_BLOCK_COPIES) -> SchedulerOutput:
    none = np.empty(0, dtype=np.int32)
    return SchedulerOutput(
        step=0, freed_rows=none, new_reqs=(), new_blocks=(), rows=none, num_scheduled_tokens=none,
        num_computed_tokens=none, is_prefill=none.astype(bool), is_sampling=none.astype(bool),
        total_num_scheduled_tokens=0, swap_outs=outs, swap_ins=ins,
    )  # fmt: skip


def copies(sources: list[int], targets: list[int]) -> BlockCopies:
    return BlockCopies(np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32))


def blocks(caches: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Per layer: [num_blocks, ...] bytes, a copy."""
    return [cache.view(torch.uint8).movedim(dim, 0).flatten(1).clone() for cache in caches]


def fill(caches: list[torch.Tensor]) -> None:
    random = torch.Generator().manual_seed(1)
    for cache in caches:
        noise = torch.randint(0, 256, cache.view(torch.uint8).shape, generator=random)
        cache.view(torch.uint8).copy_(noise)


def check_round_trip(caches: list[torch.Tensor], transfers: BlockTransfers, dim: int) -> None:
    fill(caches)
    before = blocks(caches, dim)
    transfers.run(step(outs=copies([1, 7, 3, 4], [5, 0, 1, 2])))
    assert all(torch.equal(one, other) for one, other in zip(blocks(caches, dim), before, strict=True))
    fill([cache.narrow(dim, 1, 4) for cache in caches])
    transfers.run(step(outs=copies([6], [3]), ins=copies([0, 5, 2, 1], [6, 2, 8, 1])))
    after = blocks(caches, dim)
    for one, old in zip(after, before, strict=True):
        for block_id, was in {6: 7, 2: 1, 8: 4, 1: 3, 5: 5, 0: 0}.items():
            assert torch.equal(one[block_id], old[was]), (block_id, was)
    transfers.run(step(ins=copies([3], [7])))
    assert all(torch.equal(one[7], old[6]) for one, old in zip(blocks(caches, dim), before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["native_cpu", "torch_reference"])
def test_pages_come_back_as_they_went_and_others_are_left_alone(name: str, dtype: torch.dtype) -> None:
    backend, config = make_backend(name), config_of(dtype)
    caches, (pool,), transfers = HostMemory(GIB).allocate_kv_caches(config, ["a", "b"], backend, dtype)
    assert transfers is not None
    dim = pool.dim
    assert [cache.shape[dim] for cache in caches] == [NUM_BLOCKS] * 2
    check_round_trip(caches, transfers, dim)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["native_cpu", "torch_reference"])
def test_a_tier_reads_pages_whole_and_writes_them_to_others(name: str, dtype: torch.dtype) -> None:
    backend, config = make_backend(name), config_of(dtype)
    caches, (pool,), _ = HostMemory(GIB).allocate_kv_caches(config, ["a", "b"], backend, dtype)
    fill(caches)
    dim = pool.dim
    before, cache_pages = blocks(caches, dim), CacheBlocks(caches, dim)
    cache_pages.write(np.array([2, 6], np.int32), cache_pages.read(np.array([7, 3], np.int32)))
    for one, old in zip(blocks(caches, dim), before, strict=True):
        assert torch.equal(one, old[[0, 1, 7, 3, 4, 5, 3, 7, 8]])


@pytest.mark.parametrize("dim", [0, 1])
def test_the_transfers_of_a_device_do_the_same_with_pages_in_either_dimension(dim: int) -> None:
    shape = (NUM_BLOCKS, 3, 8) if dim == 0 else (2, NUM_BLOCKS, 3, 4)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    check_round_trip(caches, DeviceTransfers([CachePool(tuple(caches), dim, NUM_BLOCKS, NUM_SWAP_BLOCKS)]), dim)


def test_the_times_of_copies_are_those_of_their_own_step() -> None:
    backend, config = make_backend("torch_reference"), config_of(torch.float32)
    transfers = HostMemory(GIB).allocate_kv_caches(config, ["a", "b"], backend, torch.float32).transfers
    assert transfers is not None and transfers.run(step())() == (None, None)
    copy_times = transfers.run(step(outs=copies([1], [1])))
    assert transfers.run(step())() == (None, None)
    out_s, in_s = copy_times()
    assert out_s is not None and out_s >= 0 and in_s is None


def test_without_swap_space_there_are_no_transfers() -> None:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=2, dtype_bytes=4)
    config = KVCacheConfig(num_blocks=3, groups=(KVCacheGroupSpec(layer_names=("a",), spec=spec),))
    backend = make_backend("torch_reference")
    assert HostMemory(GIB).allocate_kv_caches(config, ["a"], backend, torch.float32).transfers is None


@pytest.mark.parametrize("on_host", [True, False])
def test_pages_of_each_pool_go_to_that_pool_s_part_of_the_swap_space(on_host: bool) -> None:
    attention, state = config_of(torch.float32).groups[0], MambaSpec(block_size=16, shapes=((5,),), dtype_bytes=(4,))
    sizes = (PoolSize(num_blocks=5, num_swap_blocks=3), PoolSize(num_blocks=4, num_swap_blocks=2))
    config = KVCacheConfig(
        num_blocks=9, num_swap_blocks=5, pools=sizes,
        groups=(attention, KVCacheGroupSpec(layer_names=("s",), spec=state, pool=1)),
    )  # fmt: skip
    backend = make_backend("native_cpu")
    caches, pools, transfers = HostMemory(GIB).allocate_kv_caches(config, ["a", "s", "b"], backend, torch.float32)
    if not on_host:
        caches, pools = allocate_kv_caches(config, ["a", "s", "b"], backend, torch.float32, HostMemory(GIB).zeros)
        transfers = DeviceTransfers(pools)
    assert transfers is not None
    keys, states = caches[0], caches[1]
    assert (tuple(states.shape), states.dtype) == ((4, 64), torch.uint8)
    fill(caches)
    before = blocks([keys], pools[0].dim)[0], blocks([states], 0)[0]
    transfers.run(step(outs=copies([7, 2, 4], [4, 0, 2])))  # block 7 is the third state
    fill([keys.narrow(pools[0].dim, 0, 1), states[:1]])
    transfers.run(step(ins=copies([2, 4, 0], [1, 8, 3])))
    after = blocks([keys], pools[0].dim)[0], blocks([states], 0)[0]
    assert torch.equal(after[0][[1, 3, 2]], before[0][[4, 2, 2]])
    assert torch.equal(after[1][[3, 2, 1]], before[1][[2, 2, 1]])
