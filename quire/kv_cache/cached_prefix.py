"""CachedPrefix: the beginning of a request that is in the cache, as a value that the scheduler passes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kv_cache.prefix_tree import ROOT


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The beginning of a request that is in the cache, and how many tokens it has.

    Attributes:
        block_ids: per group: those of its full blocks that the next query sees.
        partial_block_ids: per group: the block with the tokens after the full blocks, which is copied, as the request
            writes on in it; empty = there are none.
        node: its full blocks in the prefix tree, but for the last `num_unpublished`; None = none is to be published.
        num_unpublished: full blocks at its end that the row that gets them has to publish.
        num_common_tokens: tokens up to which there are cached blocks of all layers without a state; at least
            `num_tokens` where layers have states, else 0.
        is_loaded: its last blocks, the states at its end among them, come from outside.
    """

    block_ids: tuple[np.ndarray, ...]
    num_tokens: int
    partial_block_ids: tuple[int, ...] = ()
    node: int | None = ROOT
    num_unpublished: int = 0
    num_common_tokens: int = 0
    is_loaded: bool = False

    def all_block_ids(self) -> np.ndarray:
        """Every block that holds some of it, [num_blocks] int32, in the order of its tokens within each group."""
        return np.concatenate([*self.block_ids, np.array(self.partial_block_ids, dtype=np.int32)])
