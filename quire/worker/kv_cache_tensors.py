"""Allocates the KV cache: one tensor per layer of a group, in the attention backend's layout, shared among groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from quire.attention.backend import AttentionBackend
from quire.attention.latent import latent_backend_of
from quire.core.kv_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from quire.errors import UnsupportedError

STORED = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
"""The kinds of layers whose cache the attention backends store and read."""


def stored_spec(layer_name: str, spec: KVCacheSpec, dtype_bytes: int) -> KVCacheSpec:
    """What a layer needs of a cache whose elements have `dtype_bytes` bytes.

    Raises:
        UnsupportedError: no backend stores a layer of its kind.
    """
    if isinstance(spec, MambaSpec):
        return spec  # its elements have sizes of their own
    if not isinstance(spec, STORED):
        names = ", ".join(kind.__name__ for kind in STORED)
        raise UnsupportedError(
            f"layer {layer_name!r} needs {spec.describe()} ({type(spec).__name__}), which no attention "
            "backend supports",
            hint=f"supported types are {names}",
            field="model",
        )
    return dataclasses.replace(spec, dtype_bytes=dtype_bytes)


def allocate_kv_caches(
    kv_cache_config: KVCacheConfig,
    layer_names: Sequence[str],
    backend: AttentionBackend,
    dtype: torch.dtype,
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> list[torch.Tensor]:
    """A zeroed cache tensor per layer, in the order of `layer_names`; layer j of every group has the same one.

    A block id is one block in each tensor, and belongs to one group at a time: layers of a group share nothing,
    layers of     different groups never use a block at once.

    Args:
        zeros: makes a tensor on the device, see `DeviceMemory.zeros`.

    Raises:
        UnsupportedError: there are states, and the backend does not keep the bytes of a block together.
    """
    has_states = any(isinstance(group.spec, MambaSpec) for group in kv_cache_config.groups)
    if has_states and page_dim(kv_cache_config, backend) != 0:
        raise UnsupportedError(
            f"attention backend {backend.name!r} scatters the bytes of a page, which a layer's state fills as one",
            hint="choose another attention_backend",
            field="attention_backend",
        )
    slot_of = {name: slot for group in kv_cache_config.groups for slot, name in enumerate(group.layer_names)}
    shape = _shape(kv_cache_config, backend, kv_cache_config.num_blocks)
    slots = [zeros(shape, dtype) for _ in range(max(slot_of.values()) + 1)]
    return [slots[slot_of[name]] for name in layer_names]


def page_dim(kv_cache_config: KVCacheConfig, backend: AttentionBackend) -> int:
    """Which dimension of a layer's tensor counts blocks."""
    few, more = (_shape(kv_cache_config, backend, num_blocks) for num_blocks in (2, 3))
    return next(dim for dim, sizes in enumerate(zip(few, more, strict=True)) if sizes[0] != sizes[1])


def distinct_tensors(kv_caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor once that several layers share, to copy its blocks once; in the order of the layers."""
    return list({cache.data_ptr(): cache for cache in kv_caches}.values())


def _shape(kv_cache_config: KVCacheConfig, backend: AttentionBackend, num_blocks: int) -> tuple[int, ...]:
    kinds = (AttentionSpec, MLAAttentionSpec)
    spec = next((group.spec for group in kv_cache_config.groups if isinstance(group.spec, kinds)), None)
    if spec is None:
        raise UnsupportedError("models without an attention layer are not supported", field="model")
    if isinstance(spec, MLAAttentionSpec):
        return latent_backend_of(backend).cache_shape(num_blocks, spec.block_size, spec.head_size)
    return backend.kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
