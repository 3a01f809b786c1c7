"""StepLimits: the largest step that a worker is made for. A value; loads no torch, so that plans need none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: requests, tokens, and tokens of one request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
