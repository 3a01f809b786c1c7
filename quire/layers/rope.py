"""Rotary position embedding: the tables of cosines and sines, for every variant of `RopeConfig`.

A position's row depends on nothing but the position, so a token gets the same rotation in every batch, chunk and
cached block. That decides how `dynamic` and `longrope` are done here; see `_dynamic_angles`, `_longrope_frequencies`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from quire.attention.backend import Rotation
from quire.config.hf_rope import RopeConfig
from quire.errors import ModelError


class RotaryEmbedding(nn.Module):
    """Tables for positions 0 .. max_positions - 1, computed in float32 and shared by all layers that rotate alike.

    Args:
        rope: None = no rotation; for layers that have query scales alone.
        query_scales: [max_positions] float32; see `Rotation`.

    Source: Su et al. 2021 (RoFormer), section 3.2.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scales: torch.Tensor | None

    def __init__(
        self,
        rope: RopeConfig | None,
        max_positions: int,
        device: torch.device,
        query_scales: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        angles, scale = (torch.empty(max_positions, 0), 1.0) if rope is None else rotary_angles(rope, max_positions)
        # [max_positions, rotary_dim / 2]
        self.register_buffer("cos", (angles.cos() * scale).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device), persistent=False)
        scales = None if query_scales is None else query_scales.float().to(device)
        self.register_buffer("query_scales", scales, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """What rotates the heads of tokens at `positions` [num_tokens]."""
        return Rotation(self.cos, self.sin, positions, self.query_scales)


def rotary_angles(rope: RopeConfig, max_positions: int) -> tuple[torch.Tensor, float]:
    """Angle of each position and pair, [max_positions, rotary_dim / 2] float32, and the factor on cosine and sine.

    Raises:
        ModelError: a rope type this function does not know.
    """
    parameters = dict(rope.parameters)
    positions = torch.arange(max_positions, dtype=torch.float32)
    scale = 1.0
    if rope.rope_type == "default":
        frequencies = _frequencies(rope.theta, rope.rotary_dim)
    elif rope.rope_type == "linear":
        frequencies = _frequencies(rope.theta, rope.rotary_dim) / parameters["factor"]
    elif rope.rope_type == "llama3":
        frequencies = _llama3_frequencies(rope, parameters)
    elif rope.rope_type == "yarn":
        frequencies, scale = _yarn_frequencies(rope, parameters), _yarn_scale(parameters)
    elif rope.rope_type == "longrope":
        frequencies, scale = _longrope_frequencies(rope, parameters, max_positions)
    elif rope.rope_type == "proportional":
        num_rotated = int(parameters["share"] * rope.rotary_dim // 2)
        frequencies = _frequencies(rope.theta, rope.rotary_dim) / parameters["factor"]
        frequencies[num_rotated:] = 0.0
    elif rope.rope_type == "dynamic":
        return _dynamic_angles(rope, parameters, positions), 1.0
    else:
        raise ModelError(f"unknown rope type {rope.rope_type!r}", field="rope_type")
    return torch.outer(positions, frequencies), scale


def _frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """Radians per position of each pair, [rotary_dim / 2]: theta ** (-2i / rotary_dim)."""
    return 1.0 / theta ** _exponents(rotary_dim)


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _dynamic_angles(rope: RopeConfig, parameters: dict[str, float], positions: torch.Tensor) -> torch.Tensor:
    """NTK scaling that sets in past the original length, with a base that grows with the position.

    The base of position p is that of a sequence of p + 1 tokens. For a prompt within the original length this is
    what transformers computes, during all of the generation too (each new token is the newest of its sequence). For
    a longer prompt transformers rotates all its tokens with the base of the prompt's length; here each token keeps
    its own, since blocks are shared between prompts of different lengths and prompts are computed in chunks.

    Source: bloc97 and emozilla 2023, "Dynamically scaled RoPE" (NTK-aware scaling).
    """
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    seq_lens = (positions + 1).clamp(min=original)
    growth = (factor * seq_lens / original - (factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    bases = (rope.theta * growth).unsqueeze(1)
    return positions.unsqueeze(1) * (1.0 / bases ** _exponents(rope.rotary_dim))


def _longrope_frequencies(
    rope: RopeConfig, parameters: dict[str, float], max_positions: int
) -> tuple[torch.Tensor, float]:
    """Each pair's frequency is divided by a factor: by the long ones where sequences may pass the original length.

    transformers chooses by the length of the sequence, and rotates all of it by the long factors once it is longer
    than the original length. Here the longest sequence that is served decides, for every sequence, since blocks are
    shared between sequences of different lengths.

    Source: Ding et al. 2024 (LongRoPE), section 3.2, with the scale of the Phi-3 checkpoints.
    """
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    is_long = max_positions > original
    scale = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    scale = parameters.get("attention_factor", scale)
    scale = parameters.get("long_mscale" if is_long else "short_mscale", scale)
    factors = torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float32)
    return 1.0 / (factors * rope.theta ** _exponents(rope.rotary_dim)), scale


def _llama3_frequencies(rope: RopeConfig, parameters: dict[str, float]) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, and those between blended.

    Source: Llama 3.1 (Grattafiori et al. 2024, section 3.4.2) as released with its reference code.
    """
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    frequencies = _frequencies(rope.theta, rope.rotary_dim)
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / parameters["factor"])


def _yarn_frequencies(rope: RopeConfig, parameters: dict[str, float]) -> torch.Tensor:
    """Pairs that turn often are kept, pairs that turn rarely are divided by the factor, with a ramp between.

    Source: Peng et al. 2023 (YaRN), section 3.2; `beta_fast` and `beta_slow` are its beta and alpha.
    """
    original = parameters["original_max_position_embeddings"]
    first = _pair_with_turns(parameters["beta_fast"], rope, original)
    last = _pair_with_turns(parameters["beta_slow"], rope, original)
    if parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    interpolated = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    frequencies = _frequencies(rope.theta, rope.rotary_dim)
    return frequencies / parameters["factor"] * interpolated + frequencies * (1.0 - interpolated)


def _pair_with_turns(num_turns: float, rope: RopeConfig, original: float) -> float:
    """The (fractional) pair that makes `num_turns` full turns over the original length."""
    return rope.rotary_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_scale(parameters: dict[str, float]) -> float:
    """Factor on cosine and sine, which sharpens the attention. Source: YaRN, section 3.4."""
    if "attention_factor" in parameters:
        return parameters["attention_factor"]
    factor = parameters["factor"]
    mscale, mscale_all_dim = parameters.get("mscale", 0.0), parameters.get("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def query_scales(max_positions: int, weight: float, interval: float, first: int = 0) -> torch.Tensor:
    """Factors on queries that grow with the position, [max_positions]: 1 + weight * log(1 + floor(p / interval)).

    Args:
        first: number of the first position in the formula: 0 in Ministral 3, 1 in Llama 4.

    Source: Llama 4 (Meta 2025) and Ministral 3 (Mistral AI 2025), as released.
    """
    positions = torch.arange(first, first + max_positions, dtype=torch.float32)
    return 1.0 + weight * torch.log(1.0 + torch.floor(positions / interval))


def rows_of_halves(num_heads: int, head_size: int, rotary_dim: int) -> torch.Tensor:
    """Order of a projection's rows that makes pairs of elements 2i, 2i + 1 pairs of i, i + rotary_dim / 2.

    Checkpoints whose rotation is interleaved (GPT-J) are loaded in it, queries and keys: scores stay the same.

    Returns:
        [num_heads * head_size] int64; row i is to be the checkpoint's row order[i].
    """
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    head = torch.cat((pairs, torch.arange(rotary_dim, head_size)))
    return (torch.arange(num_heads).unsqueeze(1) * head_size + head).flatten()
