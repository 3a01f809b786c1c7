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
from quire.executor.base import Executor
from quire.kv_offload.block_file import FORMAT_VERSION
from quire.kv_offload.block_files import BlockFiles
from quire.kv_offload.cipher import BlockCipher, read_key
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.host_blocks import HostBlocks
from quire.kv_offload.offload_store import OffloadStore
from quire.kv_offload.policies import POLICIES
from quire.logger import get_logger
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.offloading import Offloading
from quire.utils.memory import format_bytes

GIB = 1 << 30
BEHIND_SHARE = 0.2
"""Of the host memory, what may wait to be written to the disk."""
CLOSE_S = 20.0
"""Most seconds for which the end of an engine waits for blocks that are being stored."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Offload:
    """A tier, ready for the scheduler, what ends it with the engine, and how much host memory its blocks take now."""

    tier: KVTier
    close: Callable[[], None]
    host_bytes: Callable[[], int] = lambda: 0


def start_offload(config: QuireConfig, executor: Executor, kv_cache_config: KVCacheConfig) -> Offload | None:
    """The configured host memory and disk behind the cache; None where there are none. The cache must be allocated.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.cache.offload_field is None:
        return None
    counts = OffloadCounts()
    host_bytes = int(config.cache.kv_offloading_size * GIB)
    behind_bytes = int(host_bytes * BEHIND_SHARE) if config.cache.kv_disk else 0
    policy = POLICIES[config.cache.kv_offloading_policy]
    host = HostBlocks(policy(host_bytes - behind_bytes)) if host_bytes else None
    store = OffloadStore(_open_disk(config, executor, counts), host, counts, max_behind_bytes=behind_bytes)
    executor.call_worker("register_block_store", store)
    tier = Offloading(store, kv_cache_config)
    return Offload(tier, lambda: store.close(CLOSE_S), lambda: 0 if host is None else host.num_bytes)


def _open_disk(config: QuireConfig, executor: Executor, counts: OffloadCounts) -> BlockFiles | None:
    path, size = config.cache.kv_disk, config.cache.kv_disk_size
    if path is None:
        return None
    identity: dict[str, Any] = executor.call_worker("kv_cache_identity")
    cipher = None
    if config.cache.kv_disk_key_file is not None:
        cipher = BlockCipher(read_key(Path(config.cache.kv_disk_key_file).expanduser()))
        identity["key"] = cipher.key_id
    directory = BlockDirectory(Path(path).expanduser(), namespace_of(identity))
    directory.create(identity)
    logger.info("kv_disk: %s, up to %s", directory.root / directory.prefix.hex(), format_bytes(size))
    return BlockFiles(directory, DiskIndex(POLICIES[config.cache.kv_offloading_policy](size)), counts, cipher)


def namespace_of(identity: dict[str, Any]) -> bytes:
    """32 bytes that name the blocks of an engine with this identity, by whatever name its model is served."""
    text = json.dumps({**identity, "format": FORMAT_VERSION, "model": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
