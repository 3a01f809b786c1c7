"""vLLM's `config.kv_transfer`: classes that say what is missing when one is made."""

from __future__ import annotations

from quire.compat.absent import absent_class
from quire.compat.vllm.features import KV_TRANSFER

__all__ = ["ECTransferConfig", "KVTransferConfig"]

KVTransferConfig = absent_class("KVTransferConfig", KV_TRANSFER)
ECTransferConfig = absent_class("ECTransferConfig", KV_TRANSFER)
