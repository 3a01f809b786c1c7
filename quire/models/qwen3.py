"""Qwen3: the shared decoder with a norm on every query and key head."""

from __future__ import annotations

from quire.attention.backend import HeadNorms
from quire.layers.norm import RMSNorm
from quire.models.blocks import DecoderAttention, DecoderForCausalLM
from quire.models.interfaces import BuildContext


class Qwen3Attention(DecoderAttention):
    """Normalises heads before they are rotated."""

    def __init__(self, build: BuildContext, layer_idx: int, name: str) -> None:
        super().__init__(build, layer_idx, name)
        eps, options = build.arch.rms_norm_eps, build.options
        self.q_norm = RMSNorm(build.arch.head_size, eps, options=options)
        self.k_norm = RMSNorm(build.arch.head_size, eps, options=options)
        self.head_norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, eps)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """As published: no biases unless the checkpoint sets `attention_bias`."""

    attention_class = Qwen3Attention
