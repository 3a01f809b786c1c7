"""Where one tensor of a checkpoint goes. Made by layers, filled by `models.weights`; no state of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from quire.layers.stored_weight import StoredWeight, WeightFormat


class WeightTarget(ABC):
    """The place of one checkpoint tensor in a model.

    Attributes:
        shape: what the tensor must have.
        neutral: the value with which factors change nothing, which dummy weights have; None = there is none.
    """

    shape: tuple[int, ...]
    neutral: float | None = None

    @abstractmethod
    def load(self, tensor: torch.Tensor) -> bool:
        """Take the values, converting the dtype; False when some are NaN or infinite, as given or as converted."""

    def expect(self, weight_format: WeightFormat | None) -> None:
        """Called on every target before the first is loaded: how the checkpoint stores it; None = as plain numbers."""
        return None

    def load_stored(self, weight: StoredWeight) -> bool:
        """`load`, of a quantized matrix; here, the numbers that it means."""
        return self.load(weight.dequantize().view(self.shape))

    @abstractmethod
    def stored(self) -> torch.Tensor:
        """The values as the model holds them, in any floating type: what quantization made of them."""

    def in_parts(self, name: str) -> Mapping[str, WeightTarget]:
        """What checkpoints may have in place of a tensor `name`: names of its parts -> their places; mostly none."""
        return {}


class TensorTarget(WeightTarget):
    """A tensor (a view, for a part of a fused one) that is overwritten.

    Args:
        offset: added to the checkpoint's values.
        neutral: see `WeightTarget`.
    """

    def __init__(self, tensor: torch.Tensor, offset: float = 0.0, *, neutral: float | None = None) -> None:
        self.tensor = tensor
        self.neutral = neutral
        self.shape = tuple(tensor.shape)
        self.offset = offset

    def load(self, tensor: torch.Tensor) -> bool:
        """Copy."""
        self.tensor.copy_(tensor + self.offset if self.offset else tensor)
        return bool(self.tensor.isfinite().all())

    def stored(self) -> torch.Tensor:
        """The checkpoint's values as they are kept."""
        return self.tensor - self.offset if self.offset else self.tensor


class RepeatedTarget(TensorTarget):
    """One number, once for every element."""

    def __init__(self, tensor: torch.Tensor, *, neutral: float | None = None) -> None:
        super().__init__(tensor, neutral=neutral)
        self.shape = (1,)

    def stored(self) -> torch.Tensor:
        """The number."""
        return self.tensor[:1]


class ReorderedTarget(WeightTarget):
    """A place whose rows come in another order than the checkpoint's, or whose matrix the checkpoint has transposed.

    Args:
        target: the place.
        rows: [num_rows] for each row of the place, the checkpoint's (after transposing); None = the same.
        is_transposed: the checkpoint's matrix is [input_size, output_size].
    """

    def __init__(self, target: WeightTarget, rows: torch.Tensor | None, is_transposed: bool = False) -> None:
        self.target = target
        self.rows = rows
        self.neutral = target.neutral
        self.is_transposed = is_transposed and len(target.shape) == 2
        self.shape = target.shape[::-1] if self.is_transposed else target.shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Bring the rows into order."""
        if self.is_transposed:
            tensor = tensor.t()
        return self.target.load(tensor if self.rows is None else tensor[self.rows])

    def expect(self, weight_format: WeightFormat | None) -> None:
        """As plain numbers where the matrix is transposed."""
        self.target.expect(None if self.is_transposed else weight_format)

    def load_stored(self, weight: StoredWeight) -> bool:
        """Rows stay as they are stored."""
        if self.is_transposed:
            return self.load(weight.dequantize())
        return self.target.load_stored(weight if self.rows is None else weight.rows(self.rows))

    def stored(self) -> torch.Tensor:
        """In the checkpoint's order."""
        stored = self.target.stored()
        if self.rows is not None:
            stored = stored[torch.argsort(self.rows)]
        return stored.t() if self.is_transposed else stored


class ReorderedColumns(WeightTarget):
    """A matrix whose inputs come in another order than the checkpoint's.

    Args:
        columns: [input_size] the checkpoint's column of each of ours.
    """

    def __init__(self, target: WeightTarget, columns: torch.Tensor) -> None:
        self.target = target
        self.columns = columns
        self.shape = target.shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Bring the columns into order."""
        return self.target.load(tensor[:, self.columns])

    def expect(self, weight_format: WeightFormat | None) -> None:
        """Plain numbers: columns cannot change places within blocks."""
        self.target.expect(None)

    def stored(self) -> torch.Tensor:
        """In the checkpoint's order."""
        return self.target.stored()[:, torch.argsort(self.columns)]


class SpreadTarget(WeightTarget):
    """Several places of one tensor, as where keys serve as values, too."""

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        self.targets = targets
        self.shape = targets[0].shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Into each of them."""
        are_finite = [target.load(tensor) for target in self.targets]
        return all(are_finite)

    def expect(self, weight_format: WeightFormat | None) -> None:
        """Each of them."""
        for target in self.targets:
            target.expect(weight_format)

    def load_stored(self, weight: StoredWeight) -> bool:
        """Into each of them."""
        are_finite = [target.load_stored(weight) for target in self.targets]
        return all(are_finite)

    def stored(self) -> torch.Tensor:
        """As the first holds it."""
        return self.targets[0].stored()


class SideBySide(WeightTarget):
    """Several places of one matrix: each takes the columns behind those of the one before."""

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        self.targets = targets
        self.sizes = [target.shape[1] for target in targets]
        self.shape = targets[0].shape[0], sum(self.sizes)

    def load(self, tensor: torch.Tensor) -> bool:
        """Each its columns."""
        parts = torch.split(tensor, self.sizes, 1)
        are_finite = [target.load(part) for target, part in zip(self.targets, parts, strict=True)]
        return all(are_finite)

    def expect(self, weight_format: WeightFormat | None) -> None:
        """Plain numbers: blocks may reach over the borders."""
        for target in self.targets:
            target.expect(None)

    def stored(self) -> torch.Tensor:
        """All columns."""
        return torch.cat([target.stored() for target in self.targets], 1)


class LaterRows(WeightTarget):
    """Rows of a table from the checkpoint's row `first` on; those before are not used."""

    def __init__(self, target: WeightTarget, first: int) -> None:
        self.target = target
        self.first = first
        self.shape = (target.shape[0] + first, *target.shape[1:])

    def load(self, tensor: torch.Tensor) -> bool:
        """Without the first rows."""
        return self.target.load(tensor[self.first :])

    def expect(self, weight_format: WeightFormat | None) -> None:
        """The same."""
        self.target.expect(weight_format)

    def load_stored(self, weight: StoredWeight) -> bool:
        """Without the first rows."""
        return self.target.load_stored(weight.rows(slice(self.first, None)))

    def stored(self) -> torch.Tensor:
        """With zeros in place of the first rows."""
        stored = self.target.stored()
        return torch.cat([stored.new_zeros(self.first, *stored.shape[1:]), stored])
