"""Which manager looks after the blocks of which kind of layer. Called by the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.kv_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from quire.errors import UnsupportedError
from quire.kv_cache.single_type.chunked_local import ChunkedLocalManager
from quire.kv_cache.single_type.full_attention import FullAttentionManager
from quire.kv_cache.single_type.row_blocks import ManagerParts, RowBlocks
from quire.kv_cache.single_type.sliding_window import SlidingWindowManager
from quire.kv_cache.single_type.state import StateManager

MANAGERS: dict[type[KVCacheSpec], Callable[[Any, ManagerParts, int], RowBlocks]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalManager,
    MambaSpec: StateManager,
}
"""A manager is made from a spec of its kind; latent attention keeps blocks as full attention does, of other bytes."""


def make_manager(spec: KVCacheSpec, parts: ManagerParts, group: int) -> RowBlocks:
    """The manager of the blocks of group number `group`.

    Raises:
        UnsupportedError: there is none for the kind.
    """
    make = MANAGERS.get(type(spec))
    if make is None:
        raise UnsupportedError(
            f"no KV-cache block manager for {spec.describe()} ({type(spec).__name__})",
            hint=f"supported types are {', '.join(sorted(kind.__name__ for kind in MANAGERS))}",
            field="model",
        )
    return make(spec, parts, group)
