"""NormArch: a normalization as data. See `model_arch`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NormArch:
    """A normalization of rows.

    Attributes:
        is_centered: subtracts the mean first (LayerNorm); otherwise RMSNorm.
        has_bias: adds a learned vector.
        has_gain: multiplies with a learned vector.
        gain_offset: added to stored gains: 1.0 where checkpoints store the difference from 1 (Gemma).
    """

    eps: float = 1e-6
    is_centered: bool = False
    has_bias: bool = False
    has_gain: bool = True
    gain_offset: float = 0.0
