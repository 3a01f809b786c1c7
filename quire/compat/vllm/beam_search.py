"""vLLM's `beam_search`."""

from __future__ import annotations

from quire.core.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
