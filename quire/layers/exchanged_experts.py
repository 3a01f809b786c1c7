"""Experts that several replicas share: `ExchangedKernels` are the kernels of a replica, whose mixtures' experts are
divided among the ranks of all replicas. Made with the device's operations.

The vectors of a token go to the ranks that have its experts, by the exchange; the results come back and are summed in
the order of the token's choices, as on one rank. A row has the same bits whatever rows are beside it, so those of other
replicas change nothing. See docs/adr/0108.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.expert_placement import ExpertPlaces
from quire.config.model_arch import RouterArch
from quire.distributed.expert_exchange import ExpertExchange
from quire.kernels.routing import Routing
from quire.kernels.shared_rows import ExpertRows
from quire.layers.delegation import delegate_operations
from quire.layers.experts import ComputeRows, ExpertKernels, ExpertsMethod
from quire.layers.kernels import LayerKernels
from quire.layers.linear_method import LinearMethod
from quire.layers.placed_experts import PlacedExperts


class ExchangedKernels(LayerKernels):
    """The kernels of one rank.

    Args:
        kernels: those of its replica.
        whole: those of a rank on its own.
        exchange: to the ranks of all replicas.
        places: where which experts are.
    """

    def __init__(
        self, kernels: LayerKernels, whole: LayerKernels, exchange: ExpertExchange, places: ExpertPlaces
    ) -> None:
        self._kernels = kernels
        self._whole = whole
        self._exchange = exchange
        self._places = places
        self.shards = kernels.shards

    def packing(self) -> Mapping[str, str | int] | None:
        """What is packed is this rank's part."""
        packing = self._kernels.packing()
        if packing is None:
            return None
        place = f"{self._exchange.rank} of {self._exchange.size}"
        return {**packing, "experts": self._places.key, "experts of": place}

    def as_stored(self) -> LayerKernels:
        """Rows stay as they are stored."""
        return ExchangedKernels(self._kernels.as_stored(), self._whole.as_stored(), self._exchange, self._places)

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """As in the replica."""
        return self._kernels.linear_method(output_size, input_size)

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """As in the replica."""
        return self._kernels.table_method(vocab_size, hidden_size)

    def experts_method(self, output_size: int, input_size: int) -> ExpertsMethod:
        """Whole experts, those of this rank."""
        inner = self._whole.experts_method(output_size, input_size)
        return PlacedExperts(inner, self._exchange.rank, self._places, takes_all_rows=False)

    def experts(self) -> ExpertKernels:
        """With those of other ranks."""
        return ExchangedExpertKernels(self._whole.experts(), self._exchange, self._places)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As in the replica."""
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the replica."""
        return self._kernels.add_rms_norm(x, residual, weight, eps)


delegate_operations(ExchangedKernels)


class ExchangedExpertKernels(ExpertKernels):
    """The operations of one rank, with an exchange around the products.

    Args:
        kernels: those of a rank on its own.
        exchange: to the other ranks.
        places: where which experts are.
    """

    def __init__(self, kernels: ExpertKernels, exchange: ExpertExchange, places: ExpertPlaces) -> None:
        self._kernels = kernels
        self._exchange = exchange
        self._places = places
        self._slots: dict[int, torch.Tensor | None] = {}  # by number of experts: recorded steps read them again

    def route(
        self,
        logits: torch.Tensor,
        num_chosen: int,
        correction: torch.Tensor | None,
        router: RouterArch,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        """As on one rank."""
        return self._kernels.route(logits, num_chosen, correction, router, expert_scales)

    def arrange(self, routing: Routing, slots: torch.Tensor) -> Routing:
        """As on one rank."""
        return self._kernels.arrange(routing, slots)

    def on_all_ranks(self, x: torch.Tensor, routing: Routing, are_rows: bool, compute: ComputeRows) -> torch.Tensor:
        """Vectors go to their experts, and results come back."""
        num_experts = len(routing.starts) - 1
        placement = self._places.of(num_experts)
        if num_experts not in self._slots:
            slots = placement.slots
            self._slots[num_experts] = None if slots is None else torch.tensor(slots, dtype=torch.int32)
        own = ExpertRows(x, routing.expert_ids, routing.places if are_rows else None)
        shared = self._exchange.dispatch(own, self._slots[num_experts], placement.firsts)
        here = Routing(routing.expert_ids, routing.weights, shared.starts, routing.rows, shared.places)
        rows = compute(shared.rows, here, True)
        return self._exchange.collect(rows, shared, routing.places, placement.firsts)

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
        """As on one rank; what rows behind the last hold means nothing."""
        return self._kernels.clamped_silu_and_mul(x, limit, alpha, offset)
