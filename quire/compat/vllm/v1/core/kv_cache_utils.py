"""vLLM's `v1.core.kv_cache_utils`: what subscribers of KV events import."""

from __future__ import annotations

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import INTERNALS

ExternalBlockHash = bytes | int

__getattr__ = module_getattr(
    __name__,
    absent_names=dict.fromkeys(("BlockHash", "KVCacheBlock", "get_kv_cache_configs", "hash_block_tokens"), INTERNALS),
)
