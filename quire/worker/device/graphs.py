"""StepGraphs: steps that were captured once and are replayed, in the place of calling the model's layers one by one.

Made with the device's other operations, called by the model runner once a step. `recorded_steps` is that of the native
CPU kernels; a device that has none uses `NoGraphs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch


class StepModel(Protocol):
    """What is captured: a model's layers."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `CausalLM`."""
        ...


class StepGraphs(ABC):
    """Owns the graphs and the buffers at fixed addresses that they read and write.

    Attributes:
        is_capture: the last step was captured, or compared with its replay.
        max_tokens: of a step that is replayed, all of whose hidden states are asked for.
    """

    is_capture = False
    max_tokens = 0

    @abstractmethod
    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        """Hidden states [num_tokens, hidden_size] of a step, valid until the next step; None = run the model itself.

        Copies the step's inputs to where a graph reads them, padded to its size where it is larger; writes the step's
        keys and values, as the model does.

        Args:
            wanted: [num_wanted] int64, tokens whose hidden states are asked for: at most half; None = all.
        """


class NoGraphs(StepGraphs):
    """Every step runs call by call."""

    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> None:
        """None."""
        return None


class MakeStepGraphs(Protocol):
    """Called once for each model, when the KV cache is allocated."""

    def __call__(
        self, model: StepModel, attention: AttentionGroups, block_tables: BlockTables, max_tokens: int = ...
    ) -> StepGraphs:
        """Graphs of steps of up to `max_tokens` tokens, of which the model never gets more from them."""
        ...


def no_graphs(
    model: StepModel, attention: AttentionGroups, block_tables: BlockTables, max_tokens: int = 0
) -> StepGraphs:
    """For devices without graphs, and engines with `enforce_eager`."""
    return NoGraphs()
