"""vLLM's `config.kv_transfer`: Quire's own settings of a KV connector, which have its names."""

from __future__ import annotations

from quire.compat.absent import absent_class
from quire.compat.vllm.features import EC_TRANSFER
from quire.config.kv_transfer import KVTransferConfig

__all__ = ["ECTransferConfig", "KVTransferConfig"]

ECTransferConfig = absent_class("ECTransferConfig", EC_TRANSFER)
