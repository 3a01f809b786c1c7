"""DraftChains: all passes of a model that drafts token by token, captured once and replayed by one call.

Made with the device's other operations, called by the models that draft. `recorded_chains` is that of the native CPU
kernels; where a device has none, each pass is a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables


class ChainTokens(NamedTuple):
    """Ids of the likeliest tokens, int32, -1 = none, and how likely they are, float32, 0 to 1.

    Both are [num_passes, n * num_places], valid until the next chain. Those behind a row's last draft mean nothing.
    """

    token_ids: np.ndarray
    scores: np.ndarray


class ChainModel(Protocol):
    """What is captured.

    Attributes:
        hidden_shape, dtype: of what is given of a row.
        num_places: tokens of a row that a pass gives; more than one only where there is one pass.
    """

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Of what is given of a row."""
        ...

    @property
    def num_places(self) -> int:
        """Tokens of a row that a pass gives."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what is given of a row."""
        ...

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[n, *hidden_shape] of a token of each row, from what was computed of the one before it."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, *hidden_shape] -> [n * num_places, vocab_size] float32, of one row's places, then of the next row's."""
        ...


class DraftChains(ABC):
    """Owns the graphs and the buffers at fixed addresses that they read and write."""

    @abstractmethod
    def capture(self, seconds: float) -> None:
        """Capture, before requests come, the chains of one row, two rows, ..., as far as so many seconds go."""

    @abstractmethod
    def run(
        self, hidden: torch.Tensor, rows: np.ndarray, positions: np.ndarray, most: np.ndarray, least_chance: float
    ) -> ChainTokens | None:
        """Draft for some rows; None = not these, each pass has to be a call.

        Args:
            hidden: [n, *hidden_shape]; what was computed of each row's newest token.
            rows: [n], distinct.
            positions: [n] integers; at which the first drafts are computed. Keys and values lie at positions' slots.
            most: [n] integers, at least 1; drafts that each row wants: as many but one are computed.
            least_chance: a row's chain ends with a draft whose chance, the product of the scores up to it, is less.
        """


MakeDraftChains = Callable[[ChainModel, AttentionGroups, BlockTables, int], DraftChains]
"""Called once, when the KV cache is allocated, with the most drafts of a row."""
