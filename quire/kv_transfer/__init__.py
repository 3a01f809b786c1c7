"""Connectors: what a program that keeps or carries blocks of the KV cache implements, and those that Quire has.

`connector` is the contract, `requests` what its scheduler's half is shown, `layout` what blocks are, `registry` finds a
connector by name. The scheduler and the worker adapt one in `scheduler.connector_tier` and `worker.connector_worker`.
"""

from quire.config.kv_transfer import KVTransferConfig
from quire.core.kv_transfer import KVConnectorOutput
from quire.kv_transfer.connector import CONTRACT_VERSION, BlockAccess, KVConnector, KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout, LayerLayout
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep, ScheduledRequest

__all__ = [
    "CONTRACT_VERSION", "BlockAccess", "ConnectorRequest", "ConnectorStep", "KVCacheLayout", "KVConnector",
    "KVConnectorOutput", "KVConnectorRole", "KVTransferConfig", "LayerLayout", "ScheduledRequest",
]  # fmt: skip
