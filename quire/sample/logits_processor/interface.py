"""LogitsProcessor: a rule that changes the logits of the rows that ask for it, one instance for all rows.

The sampler's own masks and penalties are written against it, and so are custom ones. A processor keeps its own
state per row; `SamplingStates` calls it when rows come, go, and get tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from quire.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """What a processor learns about the request that is placed on a row.

    Attributes:
        params: its sampling parameters.
        prompt_token_ids, output_token_ids: int32; output is not empty when the request comes back after preemption.
        eos_token_id: -1 = none.
    """

    params: SamplingParams
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_id: int = -1


class ProcessorKind(ABC):
    """What an engine takes as a custom processor: a class that checks requests and makes the one instance."""

    @classmethod
    @abstractmethod
    def create(cls, vocab_size: int, max_num_seqs: int, device: torch.device) -> LogitsProcessor:
        """The instance for an engine; arguments as those of `LogitsProcessor`."""

    @classmethod  # noqa: B027 (checking nothing is a valid choice)
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuse a request's parameters before it is queued.

        Raises:
            ValidationError: `params` (their `extra_args`, usually) ask for something this processor cannot do.
        """


class LogitsProcessor(ProcessorKind):
    """Changes logits. What it does to a line must depend on that line's request alone.

    Args:
        vocab_size: width of the logits.
        max_num_seqs: rows are in [0, max_num_seqs).
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.device = device

    @classmethod
    def create(cls, vocab_size: int, max_num_seqs: int, device: torch.device) -> LogitsProcessor:
        """As `ProcessorKind`."""
        return cls(vocab_size, max_num_seqs, device)

    @property
    def source(self) -> type:
        """The class to name when this fails."""
        return type(self)

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True when the likeliest token never changes: greedy requests then skip this processor."""

    @abstractmethod
    def add_row(self, row: int, request: RowRequest) -> bool:
        """A request is placed on `row`, which is free; True when this processor acts on it."""

    @abstractmethod
    def remove_row(self, row: int) -> None:
        """The request on `row`, one this processor acts on, is gone."""

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Tokens were sampled for rows this processor acts on.

        Args:
            rows, token_ids: [num_lines] int32; rows are distinct.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """The changed logits; changing the argument and returning it is allowed.

        Args:
            logits: [num_lines, vocab_size] float32; only lines of rows this processor acts on.
            rows: [num_lines] int32; the row of each line, distinct.
        """
