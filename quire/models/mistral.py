"""Mistral: the shared decoder, with a sliding window in every layer when the checkpoint sets one."""

from __future__ import annotations

from quire.models.blocks import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """The windows come with the `ModelArch`."""
