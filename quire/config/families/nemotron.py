"""Arcee; Nemotron and Minitron: squared ReLUs without gates, LayerNorms with gains less one, half-rotated heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import read_activation, read_intermediate_size, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.model_arch import MLPArch, NormArch


class Arcee(Llama):
    """A Llama with squared ReLUs. Source: Arcee AI 2025 (AFM-4.5B), as released."""

    defaults: ClassVar[Mapping[str, object]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def mlp(cls, config: FieldReader) -> MLPArch:
        """Without gates."""
        return MLPArch(
            intermediate_size=read_intermediate_size(config),
            activation=read_activation(config, "hidden_act", "relu2", ("relu2",)),
            is_gated=False,
            has_bias=cls.mlp_bias(config),
        )


class Nemotron(Arcee):
    """Source: Parmar et al. 2024 (Nemotron-4 15B), section 2."""

    defaults: ClassVar[Mapping[str, object]] = {"partial_rotary_factor": 0.5}

    @classmethod
    def norm(cls, config: FieldReader) -> NormArch:
        """With a bias."""
        eps = read_norm_eps(config, "norm_eps", 1e-5)
        return NormArch(eps=eps, is_centered=True, has_bias=True, gain_offset=1.0)
