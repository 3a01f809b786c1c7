"""Requests over steps for the tests of recurrent kernels: whole prompts, and the same prompts in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.kernels.recurrent import RecurrentBatch


def batch_of(
    requests: Sequence[tuple[int, int]], read: Sequence[int] | None = None, write: Sequence[int] | None = None
) -> RecurrentBatch:
    """A step of requests (tokens before it, tokens in it); request i has block i + 1 unless told."""
    own = [i + 1 for i in range(len(requests))]
    starts = torch.tensor([0, *(num_rows for _, num_rows in requests)], dtype=torch.int32).cumsum(0).int()
    return RecurrentBatch(
        query_start_loc=starts,
        seq_lens=torch.tensor([before + num_rows for before, num_rows in requests], dtype=torch.int32),
        read_blocks=torch.tensor(own if read is None else list(read), dtype=torch.int32),
        write_blocks=torch.tensor(own if write is None else list(write), dtype=torch.int32),
    )


def chunks_of(lengths: Sequence[int], chunk: int) -> Iterator[tuple[RecurrentBatch, list[int]]]:
    """Steps of at most `chunk` tokens of each request, and the rows that are theirs where prompts lie in a row."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for done in range(0, max(lengths), chunk):
        requests = [(done, max(0, min(chunk, length - done))) for length in lengths]
        rows = [starts[i] + done + j for i, (_, count) in enumerate(requests) for j in range(count)]
        yield batch_of([(before if count else 1, count) for before, count in requests]), rows
