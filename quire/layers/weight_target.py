"""Where one tensor of a checkpoint goes. Made by layers, filled by `models.weights`; no state of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class WeightTarget(ABC):
    """The place of one checkpoint tensor in a model.

    Attributes:
        shape: what the tensor must have.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def load(self, tensor: torch.Tensor) -> bool:
        """Take the values, converting the dtype; False when some are NaN or infinite, as given or as converted."""

    @abstractmethod
    def stored(self) -> torch.Tensor:
        """The values as the model holds them, in any floating type: what quantization made of them."""


class TensorTarget(WeightTarget):
    """A tensor (a view, for a part of a fused one) that is overwritten."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def load(self, tensor: torch.Tensor) -> bool:
        """Copy."""
        self.tensor.copy_(tensor)
        return bool(self.tensor.isfinite().all())

    def stored(self) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor


class PermutedRows(WeightTarget):
    """Rows in another order than the checkpoint has them; biases alike.

    Args:
        target: takes the reordered tensor.
        order: [rows] int64; row i of the target is row order[i] of the checkpoint.
    """

    def __init__(self, target: WeightTarget, order: torch.Tensor) -> None:
        self.target = target
        self.order = order
        self.shape = target.shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Reorder, then load."""
        return self.target.load(tensor.index_select(0, self.order))

    def stored(self) -> torch.Tensor:
        """In the checkpoint's order."""
        return self.target.stored().index_select(0, torch.argsort(self.order))
