"""Shards: how the matrices of a model are divided over ranks, by outputs, and how their results come together.

A rank has some outputs (rows) of a matrix, computes their columns of the product, and gets those of the others from the
communicator. No sum is ever divided: every number is computed by one rank, by the kernel that one rank alone would use,
so the bits do not depend on the number of ranks. See docs/adr/0094. Made with the device's operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.distributed.communicator import Communicator
from quire.layers.linear_method import LinearMethod
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import WeightTarget

Ranges = tuple[tuple[int, int], ...]
"""(first, end) of rows, in the order in which a rank keeps them."""

UNIT = 16  # rows that a packed weight keeps side by side


@dataclass(frozen=True, slots=True)
class Shards:
    """A rank's place, and the others."""

    communicator: Communicator

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    def widths(self, size: int) -> tuple[int, ...] | None:
        """How many of `size` outputs each rank has, in panels of 16; None = too few to divide: every rank has all."""
        num_panels = -(-size // UNIT)
        if num_panels < self.size:
            return None
        ends = [min(size, UNIT * (num_panels * rank // self.size)) for rank in range(self.size + 1)]
        ends[-1] = size
        return tuple(end - begin for begin, end in itertools.pairwise(ends))

    def own_range(self, widths: Sequence[int]) -> tuple[int, int]:
        """(first, end) of this rank's."""
        first = sum(widths[: self.rank])
        return first, first + widths[self.rank]

    def all_gather(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The columns of all ranks: [num_rows, widths[rank]] -> [num_rows, sum of widths]."""
        return self.communicator.all_gather(own, widths)


class OwnRows(WeightTarget):
    """A matrix of the checkpoint of which this rank keeps some rows. Others are not read.

    Args:
        shape: of the whole matrix.
        parts: (first row, place of some rows from there on).
    """

    def __init__(self, shape: tuple[int, int], parts: Sequence[tuple[int, WeightTarget]]) -> None:
        self.shape = shape
        self._parts = parts

    def load(self, tensor: torch.Tensor) -> bool:
        """The rows that are kept."""
        are_finite = [part.load(tensor[first : first + part.shape[0]]) for first, part in self._parts]
        return all(are_finite)

    def expect(self, weight_format: WeightFormat | None) -> None:
        """The same for all rows."""
        for _, part in self._parts:
            part.expect(weight_format)

    def load_stored(self, weight: StoredWeight) -> bool:
        """The rows that are kept."""
        are_finite = [part.load_stored(weight.rows(slice(first, first + part.shape[0]))) for first, part in self._parts]
        return all(are_finite)

    def stored(self) -> torch.Tensor:
        """With zeros in place of the rows of other ranks."""
        stored = torch.zeros(self.shape)
        for first, part in self._parts:
            stored[first : first + part.shape[0]] = part.stored()
        return stored


@dataclass(frozen=True)
class OwnRowsMethod(LinearMethod):
    """A weight of which this rank keeps, and multiplies by, some rows: the outputs are those of these rows alone.

    The layer's output size and its bias are those of the whole.

    Attributes:
        inner: stores the rows.
        ranges: which they are.
    """

    inner: LinearMethod
    ranges: Ranges

    @property
    def num_rows(self) -> int:
        """Of this rank."""
        return sum(end - first for first, end in self.ranges)

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Storage for these rows."""
        layer.__dict__["row_size"] = input_size
        self.inner.create_weights(layer, self.num_rows, input_size, dtype, device)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """A place for those of the rows that are here."""
        parts, kept = [], 0
        for first, end in self.ranges:
            begin, stop = max(first, first_row), min(end, first_row + num_rows)
            if begin < stop:
                place = self.inner.row_target(layer, kept + begin - first, stop - begin)
                parts.append((begin - first_row, place))
            kept += end - first
        return OwnRows((num_rows, layer.__dict__["row_size"]), parts)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """[num_tokens, num_rows]."""
        return self.inner.apply(layer, x, self._own_bias(layer, bias), out_dtype)

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """`apply` into `out` [num_tokens, num_rows]."""
        self.inner.apply_into(layer, x, self._own_bias(layer, bias), out)

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Where the ranges are gates, then as many ups."""
        return self.inner.apply_gated(layer, x, self._own_bias(layer, bias))

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """By their numbers among these rows."""
        return self.inner.gather_rows(layer, row_ids)

    def _own_bias(self, layer: nn.Module, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Kept from the first product on, before which all weights are loaded."""
        if bias is None:
            return None
        own: torch.Tensor | None = layer.__dict__.get("own_bias")
        if own is None:
            own = torch.cat([bias[first:end] for first, end in self.ranges])
            layer.__dict__["own_bias"] = own
        return own


@dataclass(frozen=True)
class GatheredMethod(LinearMethod):
    """A divided weight whose product is whole on every rank.

    Attributes:
        own: this rank's rows.
        shards: the others.
        widths: rows of each rank.
        is_for_sampling: the product is a table's logits, which rank 0 alone gets.
    """

    own: OwnRowsMethod
    shards: Shards
    widths: tuple[int, ...]
    is_for_sampling: bool = False

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """As `own`."""
        self.own.create_weights(layer, output_size, input_size, dtype, device)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """As `own`."""
        return self.own.row_target(layer, first_row, num_rows)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """The whole product; of a table on rank 0 alone, elsewhere this rank's columns."""
        own = self.own.apply(layer, x, bias, out_dtype)
        if not self.is_for_sampling:
            return self.shards.all_gather(own, self.widths)
        return self.shards.communicator.all_gather(own, self.widths, root=0)

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Not asked for: gates and ups that belong together are on different ranks."""
        raise NotImplementedError("gates and ups are divided by `LayerKernels.own_rows`")

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Each row from the rank that has it."""
        communicator, (first, end) = self.shards.communicator, self.own.ranges[0]
        ids = row_ids if row_ids.dtype == torch.int64 else row_ids.to(torch.int64)
        rows = self.own.gather_rows(layer, communicator.local_ids(ids, first, end - first))
        return communicator.gather_rows(ids, first, end - first, rows)
