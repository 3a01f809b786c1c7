"""Makes and registers the tier behind the KV cache that the configuration names. Called by `core_factory`; no state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import QuireConfig
from quire.core.kv_spec import KVCacheConfig
from quire.errors import UnsupportedError
from quire.executor.base import Executor
from quire.kv_offload.block_file import FORMAT_VERSION
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.disk_store import DiskStore
from quire.kv_offload.policies.lru import LRUPolicy
from quire.logger import get_logger
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.offloading import Offloading
from quire.utils.memory import format_bytes

CLOSE_S = 5.0
"""Most seconds for which the end of an engine waits for blocks that are being stored."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Offload:
    """A tier, ready for the scheduler, and what ends it with the engine."""

    tier: KVTier
    close: Callable[[], None]


def start_offload(config: QuireConfig, executor: Executor, kv_cache_config: KVCacheConfig) -> Offload | None:
    """The configured disk behind the cache; None where there is none. The cache must be allocated.

    Raises:
        ConfigError: the directory cannot be used.
        UnsupportedError: the model's layers free blocks, so that a sequence is not what its blocks hold.
    """
    if config.cache.kv_disk is None:
        return None
    if [group.spec.keeps_sequence for group in kv_cache_config.groups] != [True]:
        kinds = ", ".join(sorted({group.spec.describe() for group in kv_cache_config.groups}))
        raise UnsupportedError(
            f"kv_disk is not supported for models with sliding windows or recurrent layers; this one has {kinds}",
            hint="leave out kv_disk", field="kv_disk",
        )  # fmt: skip
    identity: dict[str, Any] = executor.call_worker("kv_cache_identity")
    directory = BlockDirectory(Path(config.cache.kv_disk).expanduser(), namespace_of(identity))
    directory.create(identity)
    index = DiskIndex(LRUPolicy(config.cache.kv_disk_size))
    store = DiskStore(directory, index)
    executor.call_worker("register_block_store", store)
    logger.info(
        "kv_disk: %d blocks in %s, %s of %s used", len(index), directory.root, format_bytes(index.num_bytes),
        format_bytes(config.cache.kv_disk_size),
    )  # fmt: skip
    tier = Offloading(store, kv_cache_config.block_size, kv_cache_config.num_blocks)
    return Offload(tier, lambda: store.close(CLOSE_S))


def namespace_of(identity: dict[str, Any]) -> bytes:
    """32 bytes that name the blocks of an engine with this identity."""
    text = json.dumps({"format": FORMAT_VERSION, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
