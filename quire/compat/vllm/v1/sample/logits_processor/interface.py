"""The interface of vLLM's logits processors: one object for the whole batch, which gets its changes before each step.

Base class of users' processors. Quire's sampler drives them through `BatchAdapter`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import torch

from quire.compat.vllm.v1.sample.logits_processor.adapter import BatchAdapter
from quire.core.sampling_params import SamplingParams
from quire.sample.logits_processor import LogitsProcessor as QuireLogitsProcessor
from quire.sample.logits_processor import ProcessorKind


class MoveDirectionality(Enum):
    """What a move leaves behind: nothing, or the request that was there."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch changed; to be followed in the order removed, added, moved.

    Attributes:
        batch_size: requests that are there now, at places 0 to batch_size - 1.
        removed: places that became free.
        added: place, parameters, prompt, and the output, a list that grows by itself.
        moved: from, to, and what becomes of the one that was there.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class ProcessorConfig(SimpleNamespace):
    """What a processor may know of its engine: `scheduler_config.max_num_seqs`, `model_config.get_vocab_size()`."""


class LogitsProcessor(ProcessorKind):
    """Changes the logits of a batch. One instance serves all requests."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Called once by the engine, with a `ProcessorConfig`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits, [batch_size, vocab_size]; changing the argument and returning it is allowed."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True when the likeliest token never changes."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None when the batch is the same."""

    @classmethod
    def create(cls, vocab_size: int, max_num_seqs: int, device: torch.device) -> QuireLogitsProcessor:
        """As `ProcessorKind`."""
        config = ProcessorConfig(
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
            speculative_config=None,
        )
        return BatchAdapter(vocab_size, max_num_seqs, device, cls(config, device, False), _update)


def _update(
    batch_size: int, removed: list[int], added: list[AddedRequest], moved: list[tuple[int, int]]
) -> BatchUpdate:
    moves = [(source, target, MoveDirectionality.UNIDIRECTIONAL) for source, target in moved]
    return BatchUpdate(batch_size, removed, added, moves)
