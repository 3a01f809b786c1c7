"""Common numbers of tokens of steps with drafts: what a step costs is learned of each size, so few are used.

The controller of drafts chooses only budgets with which a step has one of them.
"""

from __future__ import annotations

# Tokens of a step up to which all sizes are common; beyond it four or three in each doubling.
ALL_COMMON = 8
COMMON_SHARES = (8, 10, 12)


def is_common(num_tokens: int) -> bool:
    """Whether steps of so many tokens are used."""
    if num_tokens <= ALL_COMMON:
        return True
    shift = num_tokens.bit_length() - 4
    return num_tokens >> shift in COMMON_SHARES and num_tokens & ((1 << shift) - 1) == 0
