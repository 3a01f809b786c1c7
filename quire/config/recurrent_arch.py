"""Mixers with a state, as data: linear attention, short convolutions, state spaces. See `model_arch`."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.norm_arch import NormArch


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetArch:
    """A linear-attention layer with the gated delta rule. Source: Yang et al. 2025 (Gated DeltaNet), section 3.

    Attributes:
        num_key_heads, num_value_heads: the second is a multiple of the first.
        key_size, value_size: elements of a head; the state of a value head is [key_size, value_size] float32.
        conv_size: tokens of the causal convolution over queries, keys and values.
        norm: gated, on every value head.
        values_are_tiled: checkpoints have the first value heads of all key heads, then the second ones (GGUF files);
            elsewhere those of a key head lie together.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int
    norm: NormArch = field(default_factory=NormArch)
    values_are_tiled: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        values = self.num_value_heads * self.value_size
        return hidden_size * (self.conv_width + 2 * values + 2 * self.num_value_heads)

    @property
    def width(self) -> int:
        """Most elements of a token between the projections."""
        return 2 * self.conv_width + 2 * self.num_value_heads * self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvArch:
    """A gated short convolution (LFM2): C * conv(B * x), with B, C and x projected from the input.

    Attributes:
        conv_size: tokens of the causal convolution.
    """

    conv_size: int
    has_bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        return 4 * hidden_size * hidden_size

    width = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaArch:
    """A selective state space: Mamba 1 (Gu and Dao 2023, section 3) or Mamba 2 (Dao and Gu 2024, section 7).

    Attributes:
        version: 1 or 2.
        inner_size: channels of the state space.
        state_size: elements of the state of a channel.
        conv_size: tokens of the causal convolution.
        num_heads, head_size, num_groups: of version 2; inner_size = num_heads * head_size.
        time_step_rank: of version 1.
        time_step_range: limits of the time step after its softplus.
        conv_bias, projection_bias: learned vectors of the convolution and of the projections.
        gated_norm: of version 2: on the gated output, in `num_groups` parts; None = there is none.
        norm_before_gate: `gated_norm` comes before the gate.
        parameter_norm: of version 1: on time step, B and C (Jamba with gains, Falcon-Mamba without); None = none.
        multipliers: on the parts of the input projection: gate, x, B, C, time step (Falcon-H1); empty = ones.
        input_scale, output_scale: factors on the mixer's input and output.
    """

    version: int
    inner_size: int
    state_size: int
    conv_size: int
    num_heads: int = 0
    head_size: int = 0
    num_groups: int = 1
    time_step_rank: int = 0
    time_step_range: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    projection_bias: bool = False
    gated_norm: NormArch | None = None
    norm_before_gate: bool = False
    parameter_norm: NormArch | None = None
    multipliers: tuple[float, ...] = ()
    input_scale: float = 1.0
    output_scale: float = 1.0

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        if self.version == 1:
            parameters = self.time_step_rank + 2 * self.state_size
            return self.inner_size * (3 * hidden_size + parameters + self.time_step_rank)
        return hidden_size * (3 * self.inner_size + 2 * self.num_groups * self.state_size + self.num_heads)

    @property
    def width(self) -> int:
        """Most elements of a token between the projections."""
        return 4 * self.inner_size + 2 * self.num_groups * self.state_size
