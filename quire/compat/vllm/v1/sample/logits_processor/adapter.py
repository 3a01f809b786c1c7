"""BatchAdapter: a processor in vLLM's interface as one of Quire's.

Quire names requests by rows that stay; vLLM by places in a batch without holes. This keeps the places, tells of their
changes before each `apply`, and puts the lines of a step where vLLM's processor expects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor, RowRequest

FREE = -1


class BatchProcessor(Protocol):
    """What is adapted."""

    def is_argmax_invariant(self) -> bool:
        """As `LogitsProcessor` here and there."""

    def update_state(self, batch_update: Any) -> None:
        """Take in how the batch changed; None = it did not."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits of the whole batch."""


class BatchAdapter(LogitsProcessor):
    """Drives `inner` on every row.

    Args:
        vocab_size, max_num_seqs, device: as `LogitsProcessor`.
        inner: what is adapted.
        make_update: (batch size, removed places, added requests, moves) as `inner` takes it.
    """

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, inner: BatchProcessor,
        make_update: Callable[[int, list[int], list[Any], list[tuple[int, int]]], Any],
    ) -> None:  # fmt: skip
        super().__init__(vocab_size, max_num_seqs, device)
        self._inner = inner
        self._make_update = make_update
        self._rows: list[int] = []  # place -> row
        self._places: dict[int, int] = {}  # row -> place
        self._outputs: dict[int, list[int]] = {}
        self._new: dict[int, tuple[Any, list[int], list[int]]] = {}
        self._removed: list[int] = []

    @property
    def source(self) -> type:
        """The adapted class."""
        return type(self._inner)

    def is_argmax_invariant(self) -> bool:
        """As the adapted one says."""
        return self._inner.is_argmax_invariant()

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Every request is its concern."""
        outputs = self._outputs[row] = request.output_token_ids.tolist()
        self._new[row] = (request.params, request.prompt_token_ids.tolist(), outputs)
        return True

    def remove_row(self, row: int) -> None:
        """Its place is free from the next update on."""
        del self._outputs[row]
        if self._new.pop(row, None) is None:
            place = self._places.pop(row)
            self._rows[place] = FREE
            self._removed.append(place)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The outputs that the adapted one was given grow."""
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._outputs[row].append(token_id)

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Lines of rows that are not in this step are zeros, and what becomes of them is dropped."""
        self._inner.update_state(self._take_update())
        places = [self._places[row] for row in rows.tolist()]
        if places == list(range(len(self._rows))):
            return self._inner.apply(logits)
        batch = logits.new_zeros((len(self._rows), logits.shape[1]))
        batch[places] = logits
        return self._inner.apply(batch)[places]

    def _take_update(self) -> Any:
        """What happened since the last call; None = nothing."""
        if not self._new and not self._removed:
            return None
        removed, self._removed = sorted(self._removed), []
        holes = sorted((place for place, row in enumerate(self._rows) if row == FREE), reverse=True)
        added = []
        for row, (params, prompt, outputs) in self._new.items():
            if not holes:
                self._rows.append(FREE)
            place = holes.pop() if holes else len(self._rows) - 1
            self._rows[place], self._places[row] = row, place
            added.append((place, params, prompt, outputs))
        self._new = {}
        return self._make_update(len(self._rows) - len(holes), removed, added, self._close(holes))

    def _close(self, holes: list[int]) -> list[tuple[int, int]]:
        """Move the last requests into `holes` (the largest first), so that none is left; the moves."""
        moved = []
        while holes:
            if self._rows[-1] == FREE:
                holes.remove(len(self._rows) - 1)
                self._rows.pop()
                continue
            target, source = holes.pop(), len(self._rows) - 1
            row = self._rows.pop()
            self._rows[target], self._places[row] = row, target
            moved.append((source, target))
        return moved
