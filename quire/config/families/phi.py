"""Phi-3 and Phi-4: Llamas whose checkpoints hold queries, keys and values as one tensor, and gates and ups as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import read_max_positions
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS, RopeConfig, parse_rope
from quire.config.model_arch import AttentionArch


class Phi3(Llama):
    """Source: Microsoft 2024 (Phi-3), section 2, and 2025 (Phi-4-Mini), section 2."""

    defaults: ClassVar[Mapping[str, object]] = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "concatenated", "mlp.gate_up_proj": "concatenated"}

    @classmethod
    def rope(cls, config: FieldReader, head_size: int, window: int | None) -> tuple[RopeConfig | None, int]:
        """The first checkpoints call longrope "yarn"."""
        raw = dict(config.raw)
        for name in ("rope_scaling", "rope_parameters"):
            scaling = raw.get(name)
            if isinstance(scaling, Mapping):
                raw[name] = {key: "longrope" if value == "yarn" else value for key, value in scaling.items()}
        return parse_rope(FieldReader(raw, config.source), head_size, read_max_positions(config))

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without biases."""
        return attention

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """One for all layers, if any."""
        return (config.optional_integer("sliding_window", 1, MAX_POSITIONS),) * num_layers
