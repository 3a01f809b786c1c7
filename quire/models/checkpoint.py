"""Checkpoint: the tensors of a model as its files hold them. Opened by `loader`, read by `weights`.

An implementation checks every header when it is made, so that a wrong file is refused before any data is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.layers.stored_weight import StoredWeight, WeightFormat


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """What is known of a tensor before it is read.

    Attributes:
        name: as the model's Hugging Face checkpoint names it.
        dtype: of plain numbers; None where `format` is not.
        format: of a quantized matrix, or of stacked ones; None = plain numbers.
        num_bytes: in the files.
        file: that holds it, for messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    format: WeightFormat | None
    num_bytes: int
    file: str


class Checkpoint(ABC):
    """Checked files.

    Attributes:
        entries: name -> what is known of each tensor.
    """

    entries: Mapping[str, CheckpointEntry]

    @property
    def is_quantized(self) -> bool:
        """Whether some matrices are not stored as plain numbers."""
        return any(entry.format is not None for entry in self.entries.values())

    def may_be_left_out(self, name: str) -> bool:
        """Of a tensor that the model does not have: whether it changes nothing."""
        return False

    @abstractmethod
    def read(self, name: str) -> torch.Tensor | StoredWeight:
        """A tensor, as its entry says: the second where it has a format. May point into the files."""

    def release(self, name: str) -> None:
        """Give the memory that shows a tensor back to the system; who reads it again, reads the file again."""
        return None
