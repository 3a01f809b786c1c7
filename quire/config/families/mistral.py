"""Mistral: a Llama without biases, with one window for all layers."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.families.llama import Llama
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch


class Mistral(Llama):
    """Source: Jiang et al. 2023 (Mistral 7B), section 2."""

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without biases, whatever config.json says."""
        return attention

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """An absent field means 4096 to transformers; an explicit null means no window."""
        default = None if "sliding_window" in config.raw else 4096
        window = config.optional_integer("sliding_window", 1, MAX_POSITIONS)
        return (window if window is not None else default,) * num_layers
