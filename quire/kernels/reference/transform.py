"""Reference: what happens to every element of an activation on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def transform(
    x: torch.Tensor, activation: str = "none", factor: float = 1.0, addend: torch.Tensor | None = None
) -> torch.Tensor:
    """Factor * activation(x) + addend, in float32, rounded once.

    Args:
        x, addend: [num_rows, size].
        activation: one of `ACTIVATIONS`.
    """
    result = factor * ACTIVATIONS[activation](x.float())
    return (result if addend is None else result + addend.float()).to(x.dtype)
