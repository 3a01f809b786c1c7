"""Qwen2 and Qwen2.5: the shared decoder with biases on the query, key and value projections."""

from __future__ import annotations

from quire.models.blocks import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The biases, and the windows of the upper layers when a checkpoint uses them, come with the `ModelArch`."""
