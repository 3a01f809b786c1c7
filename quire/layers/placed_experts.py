"""Whole experts on ranks (expert parallel): `PlacedExperts` stores and multiplies a rank's experts, and
`PlacedExpertKernels` brings the rows of all together. Made by `sharded`.

Every rank has the hidden states of all tokens and routes them alike, so nothing is sent out. A rank computes the rows
of its experts, by the kernel that one rank uses for all; then every rank gets those of the others, and sums each
token's in the order of its choices, as one rank does. See docs/adr/0100.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config.expert_placement import ExpertPlaces
from quire.config.model_arch import RouterArch
from quire.kernels.routing import Routing
from quire.layers.experts import ComputeRows, ExpertKernels, ExpertLinear, ExpertsMethod
from quire.layers.sharding import OwnRows, Shards
from quire.layers.weight_target import WeightTarget


@dataclass(frozen=True)
class PlacedExperts(ExpertsMethod):
    """`layer.own` has the experts of this rank. Rows of others are not computed and mean nothing.

    Attributes:
        inner: stores and multiplies them.
        rank: among those that have experts.
        places: where which experts are.
        takes_all_rows: it is given the rows of all experts, in the order of slots; else those of its own.
    """

    inner: ExpertsMethod
    rank: int
    places: ExpertPlaces
    takes_all_rows: bool = True

    def create_weights(self, layer: ExpertLinear, dtype: torch.dtype, device: torch.device) -> None:
        """Register `own`."""
        placement = self.places.of(layer.num_experts)
        layer.__dict__["placement"] = placement
        layer.__dict__["own_experts"] = own = placement.own(self.rank)
        layer.own = ExpertLinear(len(own), layer.input_size, layer.output_size, self.inner, dtype, device, bias=False)

    def row_target(self, layer: ExpertLinear, expert: int, first_row: int, num_rows: int) -> WeightTarget:
        """Its place, or nowhere: the experts of other ranks are not read."""
        own: tuple[int, ...] = layer.__dict__["own_experts"]
        if expert not in own:
            return OwnRows((num_rows, layer.input_size), [])
        return self.inner.row_target(_own(layer), own.index(expert), first_row, num_rows)

    def apply(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """The rows of own experts."""
        own, own_starts = self._part(layer, starts)
        return self.inner.apply(own, x, rows, own_starts)

    def apply_gated(
        self, layer: ExpertLinear, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor
    ) -> torch.Tensor:
        """The rows of own experts."""
        own, own_starts = self._part(layer, starts)
        return self.inner.apply_gated(own, x, rows, own_starts)

    def _part(self, layer: ExpertLinear, starts: torch.Tensor) -> tuple[ExpertLinear, torch.Tensor]:
        own = _own(layer)
        if layer.bias is not None and own.bias is None:  # at the first product all weights are loaded
            index = torch.tensor(layer.__dict__["own_experts"])
            own.bias = torch.nn.Parameter(layer.bias[index].contiguous(), requires_grad=False)
        if not self.takes_all_rows:
            return own, starts
        firsts = layer.__dict__["placement"].firsts
        return own, starts[firsts[self.rank] : firsts[self.rank + 1] + 1]


def _own(layer: ExpertLinear) -> ExpertLinear:
    own = layer.own
    assert isinstance(own, ExpertLinear)
    return own


class PlacedExpertKernels(ExpertKernels):
    """The operations of one rank, with rows in the order of slots.

    Args:
        kernels: those of a rank on its own.
        shards: the other ranks.
        places: where which experts are.
    """

    def __init__(self, kernels: ExpertKernels, shards: Shards, places: ExpertPlaces) -> None:
        self._kernels = kernels
        self._shards = shards
        self._places = places
        self._slots: dict[int, torch.Tensor] = {}  # by number of experts: recorded steps read them again

    def route(
        self,
        logits: torch.Tensor,
        num_chosen: int,
        correction: torch.Tensor | None,
        router: RouterArch,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        """As on one rank; rows are sorted by slot."""
        routing = self._kernels.route(logits, num_chosen, correction, router, expert_scales)
        num_experts = logits.shape[1]
        slots = self._places.of(num_experts).slots
        if slots is None:
            return routing
        if num_experts not in self._slots:
            self._slots[num_experts] = torch.tensor(slots, dtype=torch.int32)
        return self._kernels.arrange(routing, self._slots[num_experts])

    def arrange(self, routing: Routing, slots: torch.Tensor) -> Routing:
        """As on one rank."""
        return self._kernels.arrange(routing, slots)

    def on_all_ranks(self, x: torch.Tensor, routing: Routing, are_rows: bool, compute: ComputeRows) -> torch.Tensor:
        """Those of other ranks' experts come from there."""
        rows = compute(x, routing, are_rows)
        firsts = self._places.of(len(routing.starts) - 1).firsts
        self._shards.communicator.gather_groups(rows, routing.starts, firsts)
        return rows

    def combine(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor | None,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """As on one rank."""
        return self._kernels.combine(rows, places, weights, shared, shared_gate)

    def spread(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """As on one rank."""
        return self._kernels.spread(x, routing)

    def clamped_silu_and_mul(self, x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
        """As on one rank; what rows of other ranks hold means nothing."""
        return self._kernels.clamped_silu_and_mul(x, limit, alpha, offset)
