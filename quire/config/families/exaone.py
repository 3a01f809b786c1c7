"""EXAONE 4: norms on outputs and on heads, windows on most layers, and rotation on those alone where there are some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.olmo import Olmo2
from quire.config.hf_config import read_windows
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig
from quire.config.model_arch import AttentionArch


class Exaone4(Olmo2):
    """Source: LG AI Research 2025 (EXAONE 4.0), section 2.1."""

    defaults: ClassVar[Mapping[str, object]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without biases, with a norm on every head."""
        return dataclasses.replace(attention, head_norm=cls.norm(config))

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """In models with windows, of the layers that have them."""
        rope, longest = super().rope(config, head_size, window)
        has_windows = config.has("sliding_window") or "sliding_window" not in config.raw
        return (None if has_windows and window is None else rope), longest

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """A pattern is a number, or a word such as LLLG, whose G is the layer without a window."""
        pattern = config.raw.get("sliding_window_pattern")
        if isinstance(pattern, str):
            period = len(pattern)
        else:
            period = config.integer("sliding_window_pattern", 0, 1 << 16, 4)
        return read_windows(config, num_layers, max(period, 1))
