"""The mixers of Mamba 1 and 2: projection, causal convolution, selective state space, gate, projection.

A request's state is that of the recurrence, float32, and the newest inputs of the convolution, in the model's type.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.model_arch import MambaArch
from quire.core.kv_spec import KVCacheSpec, MambaSpec
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.state_layout import from_lanes, in_lanes, mamba_state_shape
from quire.layers.causal_conv import CausalConv
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.recurrent_state import recurrent_batch, state_tensors
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.tensor_layouts import linear_targets


class DecayTarget(WeightTarget):
    """The decays A = -exp(A_log), of which checkpoints have the logarithms.

    Args:
        tensor: where they go: [num_heads], or as `state_layout.in_lanes` has them.
        shape: of the checkpoint's tensor.
    """

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.shape = shape

    def load(self, tensor: torch.Tensor) -> bool:
        """Compute them in float32."""
        decays = -tensor.float().exp()
        self.tensor.copy_(in_lanes(decays) if decays.dim() == 2 else decays)
        return bool(self.tensor.isfinite().all())

    def stored(self) -> torch.Tensor:
        """The logarithms."""
        decays = from_lanes(self.tensor, self.shape[0]) if len(self.shape) == 2 else self.tensor
        return (-decays).log()


class MambaPart(Part):
    """What both versions have in common.

    Args:
        in_size: outputs of the input projection.
        conv_width: channels of the convolution.
        state_shape: of the recurrence's state of one request.
    """

    def __init__(
        self,
        build: BuildContext,
        arch: MambaArch,
        name: str,
        in_size: int,
        conv_width: int,
        state_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        options, hidden_size = build.options, build.arch.hidden_size
        self.arch = arch
        self.kernels = options.kernels
        self.in_proj = Linear(hidden_size, in_size, bias=arch.projection_bias, options=options)
        self.conv1d = CausalConv(conv_width, arch.conv_size, bias=arch.conv_bias, has_silu=True, options=options)
        self.out_proj = Linear(arch.inner_size, hidden_size, bias=arch.projection_bias, options=options)
        self.shapes = (state_shape, self.conv1d.state_shape)
        self.dtypes = (torch.float32, options.dtype)
        self.cache_idx = build.cache_layers.add(name, self)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        cache, metadata = context.state(self.cache_idx)
        states, inputs = state_tensors(cache, self.shapes, self.dtypes)
        batch = recurrent_batch(metadata)
        output: torch.Tensor = self.out_proj(self._mix(self.in_proj(x), states, inputs, batch))
        if self.arch.output_scale != 1.0:
            output = self.kernels.scale(output, self.arch.output_scale)
        return output

    @abstractmethod
    def _mix(
        self, projected: torch.Tensor, states: torch.Tensor, inputs: torch.Tensor, batch: RecurrentBatch
    ) -> torch.Tensor:
        """From the input projection to what the output projection takes: [num_tokens, inner_size].

        Args:
            states, inputs: the recurrence's and the convolution's states of all blocks.
        """

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """One state for each request."""
        return MambaSpec(
            block_size=block_size, shapes=self.shapes, dtype_bytes=tuple(dtype.itemsize for dtype in self.dtypes)
        )

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from linear_targets(self.in_proj, f"{name}.in_proj")
        yield from self.conv1d.targets(f"{name}.conv1d")
        yield from linear_targets(self.out_proj, f"{name}.out_proj")


class Mamba1Part(MambaPart):
    """Gu and Dao 2023 (Mamba), section 3.4: a decay of its own for each channel and element of its state.

    Attributes:
        decays: A, as `state_layout.in_lanes` has it.
        skip: D, [inner_size].
    """

    def __init__(self, build: BuildContext, arch: MambaArch, name: str) -> None:
        inner_size, state_size, rank, options = arch.inner_size, arch.state_size, arch.time_step_rank, build.options
        super().__init__(build, arch, name, 2 * inner_size, inner_size, mamba_state_shape(inner_size, state_size))
        # Of no less than 8 bits: they are small, and what they give goes through exponentials.
        kernels = options.kernels
        num_parameters = rank + 2 * state_size
        method = kernels.fine_method(num_parameters, inner_size)
        self.x_proj = Linear(inner_size, num_parameters, bias=False, options=options, method=method)
        method = kernels.fine_method(inner_size, rank)
        self.dt_proj = Linear(rank, inner_size, bias=True, options=options, method=method)
        self.norms = nn.ModuleList()  # of time step, B and C
        if arch.parameter_norm is not None:
            self.norms.extend(
                Norm(size, arch.parameter_norm, options=options) for size in (rank, state_size, state_size)
            )
        self.decays = _numbers(*mamba_state_shape(inner_size, state_size), device=options.device)
        self.skip = _numbers(inner_size, device=options.device)

    def _mix(
        self, projected: torch.Tensor, states: torch.Tensor, inputs: torch.Tensor, batch: RecurrentBatch
    ) -> torch.Tensor:
        inner_size, rank, state_size = self.arch.inner_size, self.arch.time_step_rank, self.arch.state_size
        x = self.conv1d(projected[:, :inner_size], inputs, batch)
        parameters = torch.split(self.x_proj(x), [rank, state_size, state_size], dim=1)
        if self.norms:
            parameters = tuple(norm(part) for norm, part in zip(self.norms, parameters, strict=True))
        low_rank, b, c = parameters
        return self.kernels.mamba_scan(
            x, self.dt_proj(low_rank), b, c, projected[:, inner_size:], self.decays, self.skip, states, batch
        )

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from super().targets(name)
        yield from linear_targets(self.x_proj, f"{name}.x_proj")
        yield from linear_targets(self.dt_proj, f"{name}.dt_proj")
        for norm_name, norm in zip(("dt_layernorm", "b_layernorm", "c_layernorm"), self.norms, strict=False):
            assert isinstance(norm, Norm)
            yield from norm.targets(f"{name}.{norm_name}")
        yield f"{name}.A_log", DecayTarget(self.decays.data, (self.arch.inner_size, self.arch.state_size))
        yield f"{name}.D", TensorTarget(self.skip.data)


class Mamba2Part(MambaPart):
    """Dao and Gu 2024 (Mamba-2), section 7.1: one decay for each head; the input projection gives all parameters.

    Attributes:
        decays: A, [num_heads].
        skip: D, [num_heads].
        time_step_bias: [num_heads].
        multipliers: of each output of the input projection; None = ones.
    """

    def __init__(self, build: BuildContext, arch: MambaArch, name: str) -> None:
        inner_size, heads, options = arch.inner_size, arch.num_heads, build.options
        columns = arch.num_groups * arch.state_size
        self.sizes = [inner_size, inner_size + 2 * columns, heads]  # gate; x, B and C; time step
        super().__init__(build, arch, name, sum(self.sizes), self.sizes[1], (heads, arch.state_size, arch.head_size))
        self.decays, self.skip, self.time_step_bias = (_numbers(heads, device=options.device) for _ in range(3))
        self.norm = None if arch.gated_norm is None else Norm(inner_size, arch.gated_norm, options=options)
        self.multipliers: torch.Tensor | None = None
        if arch.multipliers or arch.input_scale != 1.0:
            parts = zip(arch.multipliers or (1.0,) * 5, (inner_size, inner_size, columns, columns, heads), strict=True)
            factors = torch.cat([torch.full((size,), factor * arch.input_scale) for factor, size in parts])
            self.multipliers = factors.to(options.dtype).to(options.device)

    def _mix(
        self, projected: torch.Tensor, states: torch.Tensor, inputs: torch.Tensor, batch: RecurrentBatch
    ) -> torch.Tensor:
        arch, columns = self.arch, self.arch.num_groups * self.arch.state_size
        if self.multipliers is not None:
            projected = self.kernels.multiply(projected, self.multipliers)
        gate, mixed, time_step = torch.split(projected, self.sizes, dim=1)
        x, b, c = torch.split(self.conv1d(mixed, inputs, batch), [arch.inner_size, columns, columns], dim=1)
        output = self.kernels.mamba2_scan(
            x, time_step, b, c, gate if self.norm is None else None, self.decays, self.skip, self.time_step_bias,
            states, batch, num_groups=arch.num_groups, time_step_range=arch.time_step_range,
        )  # fmt: skip
        if self.norm is None:
            return output
        return self.kernels.gated_rms_norm(
            output, gate, self.norm.weight, self.norm.eps, num_groups=arch.num_groups,
            gate_first=not arch.norm_before_gate,
        )  # fmt: skip

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from super().targets(name)
        yield f"{name}.A_log", DecayTarget(self.decays.data, (self.arch.num_heads,))
        yield f"{name}.D", TensorTarget(self.skip.data)
        yield f"{name}.dt_bias", TensorTarget(self.time_step_bias.data)
        if self.norm is not None:
            yield from self.norm.targets(f"{name}.norm")


def mamba_part(build: BuildContext, arch: MambaArch, layer_idx: int, name: str) -> MambaPart:
    """The mixer of an arch's version."""
    return Mamba1Part(build, arch, name) if arch.version == 1 else Mamba2Part(build, arch, name)


def _numbers(*shape: int, device: torch.device) -> nn.Parameter:
    """Parameters of a recurrence: float32 in models of any type, since exponentials are taken of them."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device), requires_grad=False)
