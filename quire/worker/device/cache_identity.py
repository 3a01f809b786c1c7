"""What the bytes of a KV cache depend on besides the tokens: blocks kept outside are read where it is the same.

Called by the worker for tiers behind the cache. Whatever differs in here makes another namespace. Weight files count by
their sizes, times and samples (`models.packing_key`), not by every byte: so a change in place that keeps all of these
is not noticed. The number of threads and the tier of the native kernels do not count: they change no bit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec

from quire.config.engine import QuireConfig
from quire.core.kv_spec import KVCacheConfig
from quire.kernels.native.library import load_library
from quire.models.packing_key import packing_key
from quire.models.registry import origin_of
from quire.models.weight_files import find_weight_files
from quire.version import __version__
from quire.worker.kv_tier import AnyBlocks
from quire.worker.setup import WorkerSetup

MODEL_SETTINGS = ("dtype", "quantization", "model_impl", "hf_overrides", "max_model_len")


def cache_identity(setup: WorkerSetup, kv_cache_config: KVCacheConfig, blocks: AnyBlocks) -> dict[str, Any]:
    """Everything that decides which bytes a block of the cache has for given tokens, as values that JSON can hold."""
    config = setup.config
    ranks = {} if setup.num_ranks == 1 else {"ranks": setup.num_ranks}
    num_stages, partition = config.parallel.pipeline_parallel_size, config.parallel.pipeline_layer_partition
    stages = {} if num_stages == 1 else {"stages": [num_stages, partition]}
    return {
        **ranks,
        **stages,
        "quire": __version__,
        "model": config.model.served_model_name or config.model.model,
        "weights": _weights(config),
        "architecture": hashlib.sha256(msgspec.json.encode(setup.arch, order="deterministic")).hexdigest(),
        "settings": {name: getattr(config.model, name) for name in MODEL_SETTINGS},
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_hash": config.cache.prefix_caching_hash_algo,
        "block_size": setup.block_size,
        "groups": [[list(group.layer_names), repr(group.spec)] for group in kv_cache_config.groups],
        "layout": blocks.describe(),
        "kernels": _kernels(setup),
    }


def _weights(config: QuireConfig) -> str:
    if config.load.load_format == "dummy":
        return f"dummy {config.model.seed}"
    assert config.arch is not None, "the config went through resolve"
    return packing_key(find_weight_files(Path(config.model_path))[1], origin_of(config.arch))


def _kernels(setup: WorkerSetup) -> dict[str, str]:
    """What computes: the build of the native library, or torch as it is on this machine."""
    backend, device = str(setup.config.device.attention_backend), setup.platform.device
    if backend == "native_cpu":
        library = Path(load_library().__file__).read_bytes()
        return {"attention": backend, "device": device, "library": hashlib.sha256(library).hexdigest()}
    torch_version = importlib.metadata.version("torch")
    machine = setup.platform.describe()
    return {"attention": backend, "device": device, "torch": torch_version, "machine": machine}
