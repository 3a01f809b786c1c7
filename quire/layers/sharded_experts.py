"""ShardedExperts: the experts of a mixture, each divided over the ranks by outputs. Made by `sharded`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.layers.experts import ExpertLinear, ExpertsMethod
from quire.layers.sharding import OwnRows, Shards
from quire.layers.weight_target import WeightTarget


@dataclass(frozen=True)
class ShardedExperts(ExpertsMethod):
    """A part of every expert's outputs is here: `layer.own` is a projection for each expert with these alone.

    Attributes:
        inner: stores and multiplies that part.
        shards: the other ranks.
        widths: outputs of each rank.
        silu_and_mul: what is done with whole rows of gates and ups.
    """

    inner: ExpertsMethod
    shards: Shards
    widths: tuple[int, ...]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Register `own`."""
        width = self.widths[self.shards.rank]
        layer.own = ExpertLinear(layer.num_experts, layer.input_size, width, self.inner, dtype, device, bias=False)

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """A place for those of the rows that are here."""
        first, end = self.shards.own_range(self.widths)
        begin, stop = max(first, first_row), min(end, first_row + num_rows)
        parts = []
        if begin < stop:
            place = self.inner.row_target(_own(layer), expert, begin - first, stop - begin)
            parts.append((begin - first_row, place))
        return OwnRows((num_rows, layer.input_size), parts)

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """Whole on every rank."""
        own = _own(layer)
        if layer.bias is not None and own.bias is None:  # at the first product all weights are loaded
            first, end = self.shards.own_range(self.widths)
            own.bias = torch.nn.Parameter(layer.bias[:, first:end].contiguous(), requires_grad=False)
        return self.shards.all_gather(self.inner.apply(own, x, rows, starts), self.widths)

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """The whole product, then the gates."""
        return self.silu_and_mul(self.apply(layer, x, rows, starts))


def _own(layer: ExpertLinear) -> ExpertLinear:
    own = layer.own
    assert isinstance(own, ExpertLinear)
    return own
