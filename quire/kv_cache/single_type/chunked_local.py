"""Blocks of layers that attend within chunks: those of finished chunks are freed. Called by the coordinator."""

from __future__ import annotations

import numpy as np

from quire.kv_cache.single_type.local_attention import LocalAttentionManager


class ChunkedLocalManager(LocalAttentionManager):
    """A query sees what is not later than itself of its own chunk; chunks of `num_tokens_seen` tokens follow on."""

    def first_token_seen(self, positions: np.ndarray) -> np.ndarray:
        """[.] position of the oldest token that queries at `positions` ([.]) see, themselves included."""
        first: np.ndarray = positions - positions % self._num_tokens_seen
        return first
