"""vLLM's `v1.spec_decode.metrics`: what drafts come to, added up over requests and steps."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SpecDecodingStats"]


@dataclass
class SpecDecodingStats:
    """Sums over drafts.

    Attributes:
        num_spec_tokens: most drafts of a request in a step.
        num_drafts: requests with drafts, over steps.
        num_draft_tokens, num_accepted_tokens: of them.
        num_accepted_tokens_per_pos: [num_spec_tokens] drafts that stood at each position.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> SpecDecodingStats:
        """Sums of nothing."""
        return cls(num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Add the drafts of one request in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1
