"""Llama 1, 2 and 3: the shared decoder as it is."""

from __future__ import annotations

from quire.models.blocks import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Biases, when a checkpoint has them, and the rotary variant come with the `ModelArch`."""
