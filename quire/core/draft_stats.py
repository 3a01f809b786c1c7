"""What became of drafts: of a step, and of one request. Counted by the scheduler, added up by the front end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """What the drafts of one step came to; one entry for each request that had some.

    Attributes:
        handles: [n] int64.
        num_drafted: [n] int32, at least 1: draft tokens that were verified.
        num_accepted: [n] int32, at most as many: how many of them stood.
    """

    handles: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray

    def items(self) -> Iterator[tuple[int, int, int]]:
        """(handle, drafted, accepted) of each request."""
        return zip(self.handles.tolist(), self.num_drafted.tolist(), self.num_accepted.tolist(), strict=True)


@dataclass(slots=True)
class DraftStats:
    """What the drafts of one sequence came to.

    Attributes:
        num_steps: in which it had drafts.
        num_drafted, num_accepted: draft tokens in those.
        num_steps_saved: tokens that came beside another one of the same step.
        outcomes: (drafted, accepted) of a step -> in how many steps.
        steps: (drafted, accepted) of each step, in order; None = not kept.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps_saved: int = 0
    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: list[tuple[int, int]] | None = None

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A step verified drafts."""
        outcome = num_drafted, num_accepted
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if self.steps is not None:
            self.steps.append(outcome)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step with drafts, the one that needs no draft included."""
        return 1 + self.num_accepted / max(1, self.num_steps)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that stood, 0 to 1."""
        return self.num_accepted / max(1, self.num_drafted)

    def content(self, num_spec_tokens: int) -> dict[str, Any]:
        """The `metrics.speculative_decoding` of a response, in vLLM's form.

        Args:
            num_spec_tokens: most drafts of a step.
        """
        histogram = [0] * (max([num_spec_tokens, *(accepted for _, accepted in self.outcomes)]) + 1)
        by_length: dict[int, list[int]] = {}
        for (drafted, accepted), count in sorted(self.outcomes.items()):
            histogram[accepted] += count
            by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += count
        content = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(length): counts for length, counts in by_length.items()},
            "num_spec_steps": self.num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_tokens": num_spec_tokens,
        }
        if self.steps is not None:
            content["per_step_accepted"] = [accepted for _, accepted in self.steps]
            content["per_step_drafted"] = [drafted for drafted, _ in self.steps]
        return content


def merged_drafts(parts: Iterable[DraftStats | None]) -> DraftStats | None:
    """Those of several sequences together, without their steps in order; None when none had drafts."""
    merged = None
    for part in parts:
        if part is None:
            continue
        merged = merged or DraftStats()
        merged.num_steps += part.num_steps
        merged.num_drafted += part.num_drafted
        merged.num_accepted += part.num_accepted
        merged.num_steps_saved += part.num_steps_saved
        for outcome, count in part.outcomes.items():
            merged.outcomes[outcome] = merged.outcomes.get(outcome, 0) + count
    return merged


def accepted_by_position(num_accepted: np.ndarray) -> list[int]:
    """How many drafts stood at each position, from the first to the last at which any did."""
    counts: list[int] = np.bincount(num_accepted)[::-1].cumsum()[::-1][1:].tolist()
    return counts
