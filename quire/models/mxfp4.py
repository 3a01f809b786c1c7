"""Experts' weights in MXFP4 (gpt-oss): 4-bit floats, of which 32 share a power of two; read as the numbers they mean.

Called by `expert_layouts` for its weight targets. What the model keeps is its own format: bfloat16, int8 or int4.

Source: Open Compute Project 2023 (Microscaling Formats v1.0), sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.layers.weight_target import WeightTarget

GROUP_SIZE = 32
GROUP_BYTES = GROUP_SIZE // 2
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
# [256, 2]: both numbers of a byte, the lower half's first.
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of a matrix.

    Args:
        blocks: [num_rows, num_groups, 16] uint8: two numbers in a byte.
        scales: [num_rows, num_groups] uint8: exponents of two, plus 127; 255 gives NaN and infinities.

    Returns:
        [num_rows, num_groups * 32] float32.
    """
    values = _PAIRS[blocks.int()].flatten(-2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(-2)


class ScalesTarget(WeightTarget):
    """The scales of all experts, kept until the blocks come.

    Args:
        targets: where each expert's matrix [num_rows, input_size] goes.
    """

    dtype = torch.uint8

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        num_rows, input_size = targets[0].shape
        self.targets = targets
        self.shape = (len(targets), num_rows, -(-input_size // GROUP_SIZE))
        self.scales: torch.Tensor | None = None

    def load(self, tensor: torch.Tensor) -> bool:
        """Keep a copy."""
        self.scales = tensor.clone()
        return True

    def stored(self) -> torch.Tensor:
        """Nothing of them is."""
        raise NotImplementedError("scales are part of the blocks' numbers")


class BlocksTarget(WeightTarget):
    """The blocks of all experts; loaded after their scales."""

    dtype = torch.uint8

    def __init__(self, scales: ScalesTarget) -> None:
        self.scales = scales
        self.shape = (*scales.shape, GROUP_BYTES)

    def load(self, tensor: torch.Tensor) -> bool:
        """Expert by expert."""
        scales, self.scales.scales = self.scales.scales, None
        assert scales is not None, "scales come first"
        are_finite = [
            target.load(dequantize(blocks, scales[expert])[:, : target.shape[1]])
            for expert, (target, blocks) in enumerate(zip(self.scales.targets, tensor, strict=True))
        ]
        return all(are_finite)

    def stored(self) -> torch.Tensor:
        """As numbers: [num_experts, num_rows, input_size]."""
        return torch.stack([target.stored() for target in self.scales.targets])
