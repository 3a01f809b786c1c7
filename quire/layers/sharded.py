"""ShardedKernels: other kernels, whose matrices are divided over ranks. Made with the device's operations.

Every projection, table and expert is divided, whatever layer it is of; norms, routers and what a layer does between its
projections are computed on every rank, unless the layer divides it itself (`own_rows`): heads of attention, and the
inner width of feed-forward networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from quire.config.expert_placement import ExpertPlaces
from quire.layers.delegation import delegate_operations
from quire.layers.experts import ExpertKernels, ExpertsMethod
from quire.layers.head_linear import HeadLinearMethod
from quire.layers.kernels import LayerKernels
from quire.layers.linear_method import LinearMethod
from quire.layers.placed_experts import PlacedExpertKernels, PlacedExperts
from quire.layers.sharded_experts import ShardedExperts
from quire.layers.sharding import GatheredMethod, OwnRowsMethod, Ranges, Shards


class ShardedKernels(LayerKernels):
    """The kernels of one rank.

    Args:
        kernels: those of a rank on its own.
        shards: its place among the others.
        places: where whole experts are; None = a part of every expert is on every rank.
    """

    def __init__(self, kernels: LayerKernels, shards: Shards, places: ExpertPlaces | None = None) -> None:
        self._kernels = kernels
        self._places = places
        self.shards = self._shards = shards

    def packing(self) -> Mapping[str, str | int] | None:
        """What is packed is this rank's part."""
        packing = self._kernels.packing()
        if packing is None:
            return None
        places = {} if self._places is None else {"experts": self._places.key}
        return {**packing, "rank": self._shards.rank, "ranks": self._shards.size, **places}

    def as_stored(self) -> LayerKernels:
        """Rows stay as they are stored on every rank."""
        return ShardedKernels(self._kernels.as_stored(), self._shards, self._places)

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """Divided by outputs; one with few is whole on every rank."""
        return self._divided(self._kernels.linear_method, output_size, input_size, is_for_sampling=False)

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """Divided by tokens; rank 0 gets the logits."""
        return self._divided(self._kernels.table_method, vocab_size, hidden_size, is_for_sampling=True)

    def fine_method(self, output_size: int, input_size: int) -> LinearMethod:
        """Divided by outputs, and whole on every rank, unlike logits."""
        return self._divided(self._kernels.fine_method, output_size, input_size, is_for_sampling=False)

    def _divided(
        self, method: Callable[[int, int], LinearMethod], output_size: int, input_size: int, *, is_for_sampling: bool
    ) -> LinearMethod:
        widths = self._shards.widths(output_size)
        inner = method(output_size, input_size)
        if widths is None:
            return inner
        own = OwnRowsMethod(inner, (self._shards.own_range(widths),))
        return GatheredMethod(own, self._shards, widths, is_for_sampling)

    def own_rows(self, ranges: Ranges, output_size: int, input_size: int) -> LinearMethod:
        """The given rows are here, and nothing is exchanged."""
        return OwnRowsMethod(self._kernels.linear_method(output_size, input_size), ranges)

    def head_linear_method(self) -> HeadLinearMethod:
        """Whole on every rank."""
        return self._kernels.head_linear_method()

    def dense_method(self) -> LinearMethod:
        """Whole on every rank."""
        return self._kernels.dense_method()

    def experts_method(self, output_size: int, input_size: int) -> ExpertsMethod:
        """Every expert divided by outputs, or whole experts."""
        if self._places is not None:
            return PlacedExperts(self._kernels.experts_method(output_size, input_size), self._shards.rank, self._places)
        widths = self._shards.widths(output_size)
        if widths is None:
            return self._kernels.experts_method(output_size, input_size)
        inner = self._kernels.experts_method(widths[self._shards.rank], input_size)
        silu_and_mul = partial(self._kernels.activate_and_mul, activation="silu")
        return ShardedExperts(inner, self._shards, widths, silu_and_mul)

    def experts(self) -> ExpertKernels:
        """As on one rank, of whole experts with those of the others."""
        kernels = self._kernels.experts()
        return kernels if self._places is None else PlacedExpertKernels(kernels, self._shards, self._places)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As on one rank."""
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As on one rank."""
        return self._kernels.add_rms_norm(x, residual, weight, eps)


delegate_operations(ShardedKernels)
