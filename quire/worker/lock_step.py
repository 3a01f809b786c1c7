"""LockStep: passes of a model whose experts are divided among several replicas; all of them take part in each.

Made by the worker where replicas share experts. A pass has the same exchanges, one for each mixture, on all replicas,
whatever their tokens; one that has nothing to compute takes part with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.attention.context import ForwardContext
from quire.distributed.expert_exchange import ExpertExchange
from quire.errors import EngineDeadError
from quire.kernels.routing import Routing
from quire.models.interfaces import CausalLM
from quire.models.parts.moe import Experts


class LockStepModel:
    """A model whose passes begin on all replicas."""

    def __init__(self, model: CausalLM, exchange: ExpertExchange) -> None:
        self._model = model
        self._exchange = exchange
        self.compute_logits = model.compute_logits
        self.kv_cache_specs = model.kv_cache_specs
        self.checkpoint_targets = model.checkpoint_targets
        self.ignored_tensors = model.ignored_tensors
        self.stored_tensors = model.stored_tensors

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As the model's, once all replicas are here."""
        self._exchange.begin_pass(len(input_ids))
        return self._model.forward(input_ids, positions, context)


class ReplicaLockStep:
    """As `core.expert_group.LockStep`.

    Args:
        dtype: of vectors.

    Attributes:
        tell: has the other ranks of this replica call `pass_empty`, too; None = there are none.
    """

    def __init__(self, exchange: ExpertExchange, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._exchange = exchange
        self._dtype = dtype
        self._mixtures = [part for part in model.modules() if isinstance(part, Experts)]
        self.tell: Callable[[], None] | None = None

    @property
    def bell(self) -> int:
        """As `LockStep.bell`."""
        return self._exchange.bell

    @property
    def num_passes(self) -> int:
        """As `LockStep.num_passes`."""
        return self._exchange.num_passes

    def watch(self, on_pass: Callable[[int], None]) -> None:
        """As `LockStep.watch`."""
        self._exchange.on_pass = on_pass

    def join(self) -> bool:
        """As `LockStep.join`."""
        if not self._exchange.is_awaited:
            return False
        with self.together():
            if self.tell is not None:
                self.tell()
            self.pass_empty()
        return True

    @torch.inference_mode()
    def pass_empty(self) -> None:
        """Compute a pass without tokens: the experts of this rank for those of others."""
        self._exchange.begin_pass(0)
        for mixture in self._mixtures:
            none = torch.empty(0, mixture.input_size, dtype=self._dtype)
            mixture.forward(none, _no_routing(mixture.arch.num_experts, mixture.arch.num_chosen))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is computed by all replicas, or by none: any error ends the group.

        Raises:
            EngineDeadError: it failed here, or another replica has ended.
        """
        try:
            yield
        except EngineDeadError:
            self._exchange.abort()
            raise
        except Exception as error:
            self._exchange.abort()
            raise EngineDeadError(
                f"a step failed, and the other replicas cannot be brought back to where it was: "
                f"{type(error).__name__}: {error}"
            ) from error


def _no_routing(num_experts: int, num_chosen: int) -> Routing:
    ids = torch.empty(0, num_chosen, dtype=torch.int32)
    return Routing(
        expert_ids=ids, weights=torch.empty(0, num_chosen), starts=torch.zeros(num_experts + 1, dtype=torch.int32),
        rows=torch.empty(0, dtype=torch.int32), places=ids,
    )  # fmt: skip
