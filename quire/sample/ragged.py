"""Reaching parts of a [num_lines, vocab_size] tensor: some lines, runs of lines, a list of token ids per line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MAX_BLOCK_ELEMENTS = 1 << 20


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`; shares memory with it on a CPU."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def take_lines(tensor: torch.Tensor, lines: np.ndarray) -> torch.Tensor:
    """A copy of some lines of [num_lines, ...]; several times faster than indexing on a CPU."""
    return tensor.index_select(0, to_device(lines, tensor.device))


def line_blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The lines of [num_lines, width] in runs of at most `MAX_BLOCK_ELEMENTS`, as views.

    Temporaries of a run stay small enough to be recycled by the allocator and to sit in the cache.
    """
    num_lines = max(1, MAX_BLOCK_ELEMENTS // tensor.shape[1])
    return [tensor[start : start + num_lines] for start in range(0, len(tensor), num_lines)]


def ragged_index(
    lists: Sequence[np.ndarray], lines: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(line, token id) of each id in `lists`, of which list i belongs to line lines[i]; both [num_ids] int64."""
    at = np.repeat(lines, [len(ids) for ids in lists]).astype(np.int64, copy=False)
    return to_device(at, device), to_device(np.concatenate(lists).astype(np.int64, copy=False), device)


def valid_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The distinct ids that lie in the vocabulary, ascending, int64."""
    return np.array(sorted({token_id for token_id in ids if 0 <= token_id < vocab_size}), dtype=np.int64)
