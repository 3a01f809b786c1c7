"""SamplingOps: everything sampling does with a step's logits, by one implementation.

Made with the device's other operations, called by the sampling step, the sampler and the penalties.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.logprobs import LogprobsArrays
from quire.sample.states import SamplingStates


class TokenSampler(Protocol):
    """The argmax of every line; for random rows temperature, custom processors, min-p, top-k, top-p and a draw.

    Attributes:
        changes_logits: whether `choose` changes lines that are not shown and have no custom processor.
    """

    changes_logits: bool

    def choose(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, shown: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose a token for each line.

        Args:
            logits: [n, vocab_size] float32, columns adjacent; may be changed. The `shown` lines of random rows
                become the scores that were drawn from, with -inf for dropped tokens; those of greedy rows stay.
            rows: [n] int32; those that have processors are distinct.
            positions: [n] integers; index in its sequence of the token to be chosen.
            flags: [n] int64; `FeatureFlag` bits of the rows.
            shown: [num_shown] line numbers, rising.

        Returns:
            ([n] int32 tokens inside the vocabulary, [n] bool: logits NaN or infinite, or no token possible).

        Raises:
            EngineGenerateError: a custom processor raised.
        """
        ...


class SamplingOps(ABC):
    """Operations on logits that lie where the model computes them."""

    def compute_logits(
        self, compute: Callable[[torch.Tensor], torch.Tensor], hidden_rows: torch.Tensor
    ) -> torch.Tensor:
        """`compute(hidden_rows)`, the logits of a step, which are valid until the next step.

        An implementation may put them into memory that stays from step to step.
        """
        return compute(hidden_rows)

    @abstractmethod
    def mask_by_grammar(self, logits: torch.Tensor, grammar: GrammarBitmask) -> torch.Tensor:
        """Logits in which tokens that grammars forbid are impossible, before anything else looks at them.

        Args:
            logits: [n, vocab_size]; may be changed.

        Returns:
            [n, vocab_size] float32.
        """

    @abstractmethod
    def apply_penalties_inplace(
        self,
        logits: torch.Tensor,
        lines: np.ndarray,
        token_ids: Sequence[np.ndarray],
        counts: np.ndarray,
        strengths: np.ndarray,
    ) -> None:
        """Penalise tokens that were seen before; see `penalties.ApplyPenalties`."""

    @abstractmethod
    def make_chooser(self, states: SamplingStates) -> TokenSampler:
        """What chooses the tokens of the rows of `states`."""

    def likeliest(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest token of each line, [n] int32, and its log-probability, [n] float32; NaN = there is none."""
        n = len(logits)
        none, one = np.zeros(n, dtype=np.int32), np.ones(n, dtype=np.int32)
        lines = self.gather_logprobs(logits, none, one, np.arange(n, dtype=np.int32), "raw_logprobs")
        return lines.token_ids[:, 1].astype(np.int32), lines.logprobs[:, 1]

    @abstractmethod
    def gather_logprobs(
        self, logits: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray, index: np.ndarray, logprobs_mode: str
    ) -> LogprobsArrays:
        """One line per row of `logits`: the given token, then the row's `num_top` likeliest.

        Args:
            logits: [n, vocab_size] float32.
            token_ids, num_top, index: as `logprobs.gather_logprobs` takes them.
            logprobs_mode: what the fields hold: raw_ or processed_, then logprobs or logits.
        """
