"""LoadBucket: classes of steps that cost about the same, for which what was learned of one holds for the others."""

from __future__ import annotations

from typing import NamedTuple

# Sequences shorter than this are of one class; above it each doubling is the next.
SHORT_CONTEXT = 256


class LoadBucket(NamedTuple):
    """A class of steps.

    Attributes:
        most_rows: largest number of rows that decode: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
        context_class: 0 = the longest sequence has fewer than SHORT_CONTEXT tokens, 1 = fewer than twice as many, ...
        has_prompts: whether the step holds parts of prompts.
    """

    most_rows: int
    context_class: int
    has_prompts: bool

    def __str__(self) -> str:
        """As in metrics: the largest number of rows, the smallest length, and whether there are prompts."""
        length = 0 if not self.context_class else SHORT_CONTEXT << (self.context_class - 1)
        return f"rows<={self.most_rows} length>={length}{' prompts' if self.has_prompts else ''}"


def bucket_of(num_decoding: int, num_other_tokens: int, max_seq_len: int) -> LoadBucket:
    """The class of a step.

    Args:
        num_decoding: rows that decode, at least 1.
        num_other_tokens: of prompts.
        max_seq_len: tokens of the longest sequence.
    """
    shift = max(0, (num_decoding - 1).bit_length() - 2)
    most_rows = ((num_decoding - 1 >> shift) + 1) << shift
    return LoadBucket(most_rows, (max_seq_len // SHORT_CONTEXT).bit_length(), num_other_tokens > 0)
