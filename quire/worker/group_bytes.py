"""Bytes of any length from another rank to rank 0, between the messages of steps. Pure functions."""

from __future__ import annotations

import numpy as np
import torch

from quire.distributed.communicator import Communicator
from quire.errors import CommunicationError

MAX_BYTES = 1 << 30


def send_bytes(communicator: Communicator, body: bytes) -> None:
    """To rank 0, which calls `receive_bytes`; no more than `MAX_BYTES`."""
    communicator.send(torch.tensor([len(body)]), 0)
    communicator.receive(torch.zeros(1, dtype=torch.int64), 0, is_patient=True)  # it is ready: no wait has a timeout
    communicator.send(torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8)), 0)


def receive_bytes(communicator: Communicator, rank: int, what: str) -> memoryview:
    """What a rank sends; waits for as long as it takes.

    Raises:
        CommunicationError: the rank has ended, or sent too much.
    """
    size = torch.zeros(1, dtype=torch.int64)
    communicator.receive(size, rank, is_patient=True)
    num_bytes = int(size[0])
    if not 0 < num_bytes <= MAX_BYTES:
        raise CommunicationError(f"rank {rank} sent {what} of {num_bytes} bytes, expected 1 to {MAX_BYTES}")
    communicator.send(size, rank)
    body = torch.empty(num_bytes, dtype=torch.uint8)
    communicator.receive(body, rank)
    return body.numpy().data
