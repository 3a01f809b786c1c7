"""DraftProposer: guesses the next tokens of a sequence, which the model then verifies several at once.

Implemented by proposers; called by the scheduler (`scheduler.drafts`) for rows that decode. A guess changes no
answer: a draft stands only where it is the token that would have been sampled.

Example: tokens are often repeated, so propose the last three again:

    class Again:
        def propose(self, token_ids, max_tokens):
            return token_ids[-3:][:max_tokens]
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class DraftProposer(Protocol):
    """Guesses tokens from the tokens before them; the same ones for the same tokens."""

    def propose(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        """[num_drafts] int32, at most `max_tokens` >= 1 of them and perhaps none: what may follow.

        Args:
            token_ids: [num_tokens] int32; prompt and output so far, not to be written.
        """
