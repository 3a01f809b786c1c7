"""AuxStates: the residual stream before chosen layers of a target, for heads that draft from it.

Made by the worker where such a head is configured, filled by the decoder in every step, read by the head. Without one
the decoder has none, and does nothing.
"""

from __future__ import annotations

import torch


class AuxStates:
    """The states of the newest step.

    Args:
        layers: numbers of layers; what they take in is kept.

    Attributes:
        tensors: of each of `layers`, rising: [num_tokens, hidden_size]; valid until the next step.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> None:
        """A step computes: nothing is known of it yet."""
        self.tensors = []

    def take(self, states: torch.Tensor) -> None:
        """The states before the next one of `layers`; the tensor is not changed later."""
        self.tensors.append(states)
