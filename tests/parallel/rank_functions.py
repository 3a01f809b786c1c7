"""Functions that tests of `collective_rpc` call on every rank, by their import names."""

from __future__ import annotations

import os
import time
from typing import Any


def describe(worker: Any, word: str, *, times: int = 1) -> dict[str, Any]:
    """Which rank this is, its process, and what was given."""
    return {"rank": worker.communicator.rank, "pid": os.getpid(), "words": [word] * times}


def fail_on(worker: Any, rank: int) -> int:
    """Fails on one rank."""
    if worker.communicator.rank == rank:
        raise KeyError("of the test")
    return rank


def die_on(worker: Any, rank: int) -> None:
    """Ends one rank's process."""
    if worker.communicator.rank == rank:
        os._exit(7)


def model_of(worker: Any) -> Any:
    """What cannot be sent."""
    return worker.model


def wait(worker: Any, seconds: float) -> None:
    """Takes its time."""
    time.sleep(seconds)


def count_weights(model: Any) -> int:
    """Of a rank's part of the model."""
    return sum(weight.numel() for weight in model.parameters())
