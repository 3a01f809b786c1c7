"""Reference: activations, of the MLP and of gates that are tensors of their own."""

from __future__ import annotations

import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The first half of each row through SiLU, times the second half.

    Args:
        x: [num_tokens, 2 * intermediate_size].

    Returns:
        [num_tokens, intermediate_size].

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5 (SwiGLU with beta 1).
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The first half of each row through GELU, times the second half.

    Args:
        x: [num_tokens, 2 * intermediate_size].
        approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5 (GEGLU).
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def multiply(x: torch.Tensor, gate: torch.Tensor, activation: str = "none") -> torch.Tensor:
    """X * activation(gate), in float32, rounded once.

    Args:
        x: [num_tokens, size].
        gate: likewise, or [size], which all rows share.
        activation: "none", "silu" or "sigmoid".
    """
    wide = gate.float()
    factor = {"none": wide, "silu": torch.nn.functional.silu(wide), "sigmoid": torch.sigmoid(wide)}[activation]
    return (x.float() * factor).to(x.dtype)


def clamped_silu_and_mul(x: torch.Tensor, limit: float, alpha: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    """Gate * sigmoid(alpha * gate) * (up + offset), with gates cut at `limit` and ups at -limit and limit.

    Args:
        x: [num_tokens, 2 * intermediate_size].

    Source: OpenAI 2025 (gpt-oss-120b & gpt-oss-20b Model Card), section 2.2.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """One of `config.model_arch.ACTIVATIONS` of every element, in the dtype of `x`.

    Raises:
        ValueError: another name.
    """
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu2":
        return torch.relu(x).square()
    raise ValueError(f"activation={activation!r} is not one of silu, gelu, gelu_tanh, relu, relu2")


def activate_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(first half of each row) * second half.

    Args:
        x: [num_tokens, 2 * intermediate_size].
        activation: one of `config.model_arch.ACTIVATIONS`.

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5.
    """
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, activation) * up
