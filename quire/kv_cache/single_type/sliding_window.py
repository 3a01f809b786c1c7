"""Blocks of sliding-window layers: those that have wholly left the window are freed. Called by the coordinator."""

from __future__ import annotations

import numpy as np

from quire.kv_cache.single_type.local_attention import LocalAttentionManager


class SlidingWindowManager(LocalAttentionManager):
    """A query sees itself and the `num_tokens_seen - 1` tokens before it."""

    def first_token_seen(self, positions: np.ndarray) -> np.ndarray:
        """[.] position of the oldest token that queries at `positions` ([.]) see, themselves included."""
        first: np.ndarray = np.maximum(positions - (self._num_tokens_seen - 1), 0)
        return first
