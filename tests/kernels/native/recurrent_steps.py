"""Requests over steps for the tests of recurrent kernels: whole prompts, and the same prompts in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.kernels.recurrent import RecurrentBatch


def batch_of(
    num_rows: Sequence[int], read: Sequence[int] | None = None, write: Sequence[int] | None = None
) -> RecurrentBatch:
    """A step with so many rows of each request; unless told, request i begins anew and writes block i + 1."""
    given = {
        "query_start_loc": [sum(num_rows[:i]) for i in range(len(num_rows) + 1)],
        "read_blocks": [-1] * len(num_rows) if read is None else read,
        "write_blocks": range(1, len(num_rows) + 1) if write is None else write,
    }
    return RecurrentBatch(**{name: torch.tensor(list(ids), dtype=torch.int32) for name, ids in given.items()})


def chunks_of(lengths: Sequence[int], chunk: int) -> Iterator[tuple[RecurrentBatch, list[int]]]:
    """Steps of at most `chunk` tokens of each prompt, and the rows that are theirs where prompts lie in a row."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for done in range(0, max(lengths), chunk):
        counts = [max(0, min(chunk, length - done)) for length in lengths]
        rows = [starts[i] + done + j for i, count in enumerate(counts) for j in range(count)]
        yield batch_of(counts, read=[i + 1 if done else -1 for i in range(len(lengths))]), rows
