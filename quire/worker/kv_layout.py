"""The layout of the KV cache, as a connector declares it to a store. Called by the worker once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.core.kv_spec import KVCacheConfig
from quire.kv_transfer.layout import KVCacheLayout, LayerLayout, digest_of
from quire.version import __version__
from quire.worker.kv_cache_tensors import CachePool
from quire.worker.setup import WorkerSetup

WEIGHTS = ("*.safetensors", "*.gguf")
ORDERS = {
    "native_cpu": "head, keys then values, elements of the head's block",
    "torch_reference": "keys then values, token, head, element",
}
"""What the dimensions of a block are, by attention backend; latents have no keys and values of their own."""


@dataclass(frozen=True, slots=True)
class ConnectorCaches:
    """The tensors that a connector may read and write: the cache of each layer by name, and the pool they are of."""

    kv_cache_config: KVCacheConfig
    by_layer: Mapping[str, torch.Tensor]
    pool: CachePool


def describe_layout(setup: WorkerSetup, caches: ConnectorCaches, kernels: Mapping[str, str]) -> KVCacheLayout:
    """How blocks of a cache lie in memory, and of which model they are.

    Args:
        kernels: what computes, as `cache_identity` has it.

    Cost: reads every weight file, 1 to 2 GB/s.
    """
    layers = []
    for tensor in caches.pool.tensors:
        block = tensor.movedim(caches.pool.dim, 0)
        names = tuple(name for name, cache in caches.by_layer.items() if cache.data_ptr() == tensor.data_ptr())
        dtype = str(tensor.dtype).removeprefix("torch.")
        layers.append(LayerLayout(names=names, shape=tuple(block.shape[1:]), strides=block.stride()[1:], dtype=dtype))
    backend = setup.config.device.attention_backend
    return KVCacheLayout(
        block_size=setup.block_size,
        order=f"{backend}: {ORDERS.get(backend, 'its own')}",
        layers=tuple(layers),
        groups=tuple(f"{group.spec.describe()} x {len(group.layer_names)}" for group in caches.kv_cache_config.groups),
        model=_model_digest(setup),
        build=f"{__version__} {digest_of(kernels)[:16]}",
    )


def _model_digest(setup: WorkerSetup) -> str:
    config = setup.config
    values: dict[str, object] = {
        "arch": repr(setup.arch), "dtype": str(setup.dtype), "quantization": config.model.quantization,
        "drafts": str(config.speculation), "load": config.load.load_format,
    }  # fmt: skip
    if config.load.load_format == "dummy":
        return digest_of({**values, "seed": config.model.seed})
    path = Path(config.model_path)
    files = [path] if path.is_file() else sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    for file in files:
        values[f"file {file.name}"] = _file_digest(file)
    return digest_of(values)


def _file_digest(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
