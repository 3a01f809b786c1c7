"""Whether there is the replica that a request asks for: by `AsyncLLM` before it is sent, and by what places it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ValidationError


def check_rank(rank: int, indexes: Sequence[int]) -> None:
    """Refuse a replica that is not there; `indexes` are those that serve, or will again. Raises `ValidationError`."""
    if rank in indexes:
        return
    if len(indexes) == 1:
        raise ValidationError(
            f"data_parallel_rank={rank}: this server has one replica, of rank {indexes[0]}",
            hint="leave it out", field="data_parallel_rank",
        )  # fmt: skip
    raise ValidationError(
        f"data_parallel_rank={rank} is not a replica of this server",
        hint=f"use one of {', '.join(map(str, indexes))}, or leave it out", field="data_parallel_rank",
    )  # fmt: skip
