"""Which stored blocks go when a tier's bytes are used up: one interface, several policies."""

from __future__ import annotations

from quire.kv_offload.policies.arc import ARCPolicy
from quire.kv_offload.policies.base import EvictionPolicy
from quire.kv_offload.policies.lfu import LFUPolicy
from quire.kv_offload.policies.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUPolicy, "lfu": LFUPolicy, "arc": ARCPolicy}
"""By the name that the configuration has for each."""
