"""Which sampling parameters another program may give by name; the others are set by parts of this engine alone."""

from __future__ import annotations

from typing import Any

from quire.core.sampling_params import SamplingParams

INTERNAL = frozenset(
    {"bad_words_token_ids", "beam_search", "detokenize", "output_kind", "reasoning", "return_progress"}
)
FROM_OUTSIDE = frozenset(SamplingParams.__struct_fields__) - INTERNAL
NEUTRAL: tuple[Any, ...] = (None, False, 0, [], {}, "")
"""Values that ask for nothing, of a parameter whose meaning is not known."""
