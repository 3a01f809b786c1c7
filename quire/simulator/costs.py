"""What a step costs: its shape, and the interface of cost models. Values and one Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work in a step.

    Attributes:
        num_tokens: computed, of decoding requests and prompts.
        num_prompt_tokens: of prompts.
        num_sampling: rows of logits: of requests that get a token, and of drafts.
        decode_context: tokens that decoding rows attend to, summed.
        prompt_pairs: (query, key) pairs of prompts' attention.
        prompt_context: tokens before the prompts' parts that are computed, summed: cached ones, and earlier parts.
        num_rows: requests in the step.
        num_new: of them placed in this step.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_sampling: int
    decode_context: int
    prompt_pairs: float
    num_rows: int
    num_new: int
    prompt_context: int = 0


def shape_of(scheduled: SchedulerOutput) -> StepShape:
    """The work in a scheduled step."""
    num_tokens, context = scheduled.num_scheduled_tokens, scheduled.num_computed_tokens
    total, num_rows, num_new = scheduled.total_num_scheduled_tokens, len(num_tokens), len(scheduled.new_reqs)
    if total == num_rows:
        return StepShape(total, 0, int(scheduled.is_sampling.sum()), int(context.sum()) + total, 0.0, num_rows, num_new)
    is_prompt = scheduled.is_chunk()
    lengths, starts = num_tokens[is_prompt].astype(np.float64), context[is_prompt]
    num_prompt = int(lengths.sum())
    return StepShape(
        total, num_prompt, int(scheduled.num_logits().sum()), int(context[~is_prompt].sum()) + total - num_prompt,
        float((lengths * (starts + (lengths + 1) / 2)).sum()), num_rows, num_new, int(starts.sum()),
    )  # fmt: skip


class CostModel(Protocol):
    """Seconds of steps, and what a request meets around the engine core."""

    def step_seconds(self, shape: StepShape) -> float:
        """Seconds that the step computes, as the engine would measure them."""

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps: planning, sending, taking in."""

    @property
    def request_s(self) -> float:
        """Seconds from a client's call to the request's being queued."""

    @property
    def request_each_s(self) -> float:
        """Seconds after which the next of several requests that come at once is queued."""

    def delivery_seconds(self, num_tokens: int) -> float:
        """Seconds from a step's end to its `num_tokens` tokens' being in their clients' hands."""
