"""The tiers behind the KV cache that the configuration asks for: host memory and disk, a connector, or none.

Called by `core_factory`; no state.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid

from quire.config import QuireConfig
from quire.core.kv_spec import KVCacheConfig
from quire.engine.kv_offload_factory import Offload, start_offload
from quire.errors import UnsupportedError
from quire.executor.base import Executor
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.registry import connector_class, make_connector
from quire.logger import get_logger
from quire.scheduler.connector_tier import ConnectorTier
from quire.scheduler.tier_stack import TierStack

logger = get_logger(__name__)


def start_tier(config: QuireConfig, executor: Executor, kv_cache_config: KVCacheConfig) -> Offload | None:
    """The configured tiers, their workers' halves registered; None where there are none. The cache must be allocated.

    Raises:
        ConfigError: it refuses its settings.
        UnsupportedError: a connector, and the model's layers free blocks: a sequence is not what its blocks hold.
    """
    made = [start_offload(config, executor, kv_cache_config), _start_connector(config, executor, kv_cache_config)]
    tiers = [one for one in made if one is not None]
    if len(tiers) < 2:
        return tiers[0] if tiers else None

    def close() -> None:
        for one in reversed(tiers):
            one.close()

    return Offload(TierStack([one.tier for one in tiers]), close, lambda: sum(one.host_bytes() for one in tiers))


def _start_connector(config: QuireConfig, executor: Executor, kv_cache_config: KVCacheConfig) -> Offload | None:
    transfer = config.kv_transfer
    if transfer is None:
        return None
    _require_whole_sequences(kv_cache_config)
    transfer = dataclasses.replace(transfer, engine_id=transfer.engine_id or uuid.uuid4().hex)
    layout: KVCacheLayout = executor.call_worker("register_kv_connector", transfer)
    half = make_connector(connector_class(transfer), transfer, KVConnectorRole.SCHEDULER, layout)
    logger.info("KV connector: %s, %s, layout %.16s", transfer.kv_connector, transfer.kv_role, layout.digest)

    @functools.cache
    def close() -> None:
        executor.call_worker("shutdown_kv_tier")
        half.shutdown()

    return Offload(ConnectorTier(half), close)


def _require_whole_sequences(kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` unless a sequence is what its blocks hold."""
    if [group.spec.keeps_sequence for group in kv_cache_config.groups] == [True]:
        return
    kinds = ", ".join(sorted({group.spec.describe() for group in kv_cache_config.groups}))
    raise UnsupportedError(
        "kv_transfer_config is not supported for models with sliding windows or recurrent layers; this one has "
        f"{kinds}", hint="leave out kv_transfer_config; kv_disk and kv_offloading_size keep such blocks",
        field="kv_transfer_config",
    )  # fmt: skip
