"""LayerKernels: what computes the layers of a model, chosen once and handed to every constructor.

`TorchKernels` runs anywhere. `native.NativeKernels` is the C++ library on a CPU.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference import causal_conv, delta_net, state_space
from quire.kernels.reference.activation import activate, activate_and_mul, multiply
from quire.kernels.reference.norm import add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from quire.layers.experts import ExpertKernels, ExpertsMethod, LoopedExperts
from quire.layers.head_linear import DenseHeads, HeadLinearMethod
from quire.layers.linear_method import LinearMethod, UnquantizedLinearMethod
from quire.layers.sharding import Ranges, Shards


class LayerKernels(ABC):
    """The operations of the layers, by one implementation; those that are not abstract are plain torch here.

    An operation must give a row the same bits whatever rows are beside it.

    Attributes:
        rows_at_once: tokens that pass through all of a feed-forward network before the next ones begin.
        shards: how matrices are divided over ranks; None = they are not.
    """

    rows_at_once = sys.maxsize
    shards: Shards | None = None

    def packing(self) -> Mapping[str, str | int] | None:
        """What stored weights depend on besides the checkpoint; None = they are the checkpoint's own tensors."""
        return None

    def as_stored(self) -> LayerKernels:
        """Those for a quantized checkpoint: with weights in its formats, or these, which take the numbers they mean."""
        return self

    @abstractmethod
    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """How a projection's weight is stored and multiplied."""

    @abstractmethod
    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """How the table of token vectors is stored, which is the output projection too when the model ties them."""

    def fine_method(self, output_size: int, input_size: int) -> LinearMethod:
        """How a small projection is stored that bears no less than 8 bits; its results are for this layer."""
        return self.table_method(output_size, input_size)

    def own_rows(self, ranges: Ranges, output_size: int, input_size: int) -> LinearMethod:
        """How the rows of a projection that are this rank's are stored and multiplied; for kernels with `shards`."""
        raise NotImplementedError("these kernels are of one rank")

    def head_linear_method(self) -> HeadLinearMethod:
        """How matrices of single heads are stored and multiplied; never quantized."""
        return DenseHeads()

    def dense_method(self) -> LinearMethod:
        """How a small projection is stored that is never quantized, such as a router's."""
        return UnquantizedLinearMethod()

    def experts_method(self, output_size: int, input_size: int) -> ExpertsMethod:
        """How the projections of a layer's experts are stored and multiplied."""
        return LoopedExperts(self.linear_method(output_size, input_size))

    def experts(self) -> ExpertKernels:
        """The other operations of mixtures of experts."""
        return ExpertKernels()

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the rows of `x` [..., size]."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of x and residual, which may be overwritten."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Subtract the mean of each row of `x` [..., size] and normalize it."""
        return layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`layer_norm` of the sum, sum) of x and residual, which may be overwritten."""
        total = self.add(x, residual)
        return self.layer_norm(total, weight, bias, eps), total

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """X + residual, which may be overwritten."""
        return residual.add_(x)

    def sum(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """X + residual, or a copy of `x`, as a new tensor; neither is changed."""
        return x.clone() if residual is None else x + residual

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [n] int64 of `x`, in their order."""
        return x[ids]

    def put_rows(self, x: torch.Tensor, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[num_rows, size], whose rows `ids` [n] int64 are those of `x` [n, size]; the others hold anything."""
        return x.new_zeros(num_rows, x.shape[1]).index_copy_(0, ids, x)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """X * factor; `x` may be overwritten."""
        return x.mul_(factor)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """An activation of `model_arch.ACTIVATIONS`, element by element; `x` may be overwritten."""
        return activate(x, activation)

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(first half of each row) * second half: [num_rows, 2 * size] -> [num_rows, size]."""
        return activate_and_mul(x, activation)

    def multiply(self, x: torch.Tensor, gate: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """Gate: x * activation(gate), "none", "silu" or "sigmoid": [num_tokens, size]; rows may be strided."""
        return multiply(x, gate, activation)

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        num_groups: int = 1,
        gate_first: bool = False,
    ) -> torch.Tensor:
        """Normalise the groups of each row of `x` [num_tokens, num_groups * size], times silu(gate) after or before."""
        return gated_rms_norm(x, gate, weight, eps, num_groups=num_groups, gate_first=gate_first)

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        has_silu: bool,
    ) -> torch.Tensor:
        """Convolve `x` [num_tokens, channels] with `weight` [conv_size, channels]; moves the states."""
        return causal_conv.causal_conv(x, weight, bias, states, batch, has_silu=has_silu)

    def delta_gates(
        self, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(decay, beta) of the gated delta rule, each [num_tokens, num_heads] float32."""
        return delta_net.delta_gates(b, a, a_log, bias)

    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        num_key_heads: int,
        scale: float,
    ) -> torch.Tensor:
        """[num_tokens, num_value_heads * value_size] of queries, keys and values of a row; moves the states."""
        return delta_net.gated_delta_rule(qkv, decay, beta, states, batch, num_key_heads=num_key_heads, scale=scale)

    def mamba_scan(
        self,
        x: torch.Tensor,
        time_step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor | None,
        a: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
    ) -> torch.Tensor:
        """The recurrence of Mamba 1 and its gate: [num_tokens, inner_size] as `x`; moves the states."""
        return state_space.mamba_scan(x, time_step, b, c, gate, a, skip, states, batch)

    def mamba2_scan(
        self,
        x: torch.Tensor,
        time_step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor | None,
        a: torch.Tensor,
        skip: torch.Tensor,
        time_step_bias: torch.Tensor,
        states: torch.Tensor,
        batch: RecurrentBatch,
        *,
        num_groups: int,
        time_step_range: tuple[float, float],
    ) -> torch.Tensor:
        """The recurrence of Mamba 2 and its gate: [num_tokens, num_heads * head_size] as `x`; moves the states."""
        return state_space.mamba2_scan(
            x, time_step, b, c, gate, a, skip, time_step_bias, states, batch, num_groups=num_groups,
            time_step_range=time_step_range,
        )  # fmt: skip


class TorchKernels(LayerKernels):
    """Plain torch operations."""

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """Dense weights."""
        return UnquantizedLinearMethod()

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """Dense weights."""
        return UnquantizedLinearMethod()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The reference."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference."""
        return add_rms_norm(x, residual, weight, eps)
