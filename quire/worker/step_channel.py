"""StepChannel: messages from rank 0 to the other ranks of a group, over their communicator.

A message is what `core.serial` makes of it: typed values and arrays, no code. Called by `group_lead`, `group_follower`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from quire.core.serial import MessageDecoder, MessageEncoder
from quire.distributed.communicator import Communicator
from quire.worker.group_messages import GroupMessage

FIRST_BYTES = 4096  # of every message; most need no more


class StepChannel:
    """One end of the channel.

    Args:
        communicator: of the group; between messages its other operations run.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[GroupMessage] = MessageDecoder(GroupMessage)
        self._first = np.zeros(FIRST_BYTES, dtype=np.uint8)

    def send(self, message: GroupMessage) -> None:
        """From rank 0 to all others."""
        body = _join(self._encoder.encode(message))
        here = min(len(body), FIRST_BYTES)
        self._first[:here] = body[:here]
        self._communicator.broadcast(torch.from_numpy(self._first))
        if len(body) > here:
            self._communicator.broadcast(torch.from_numpy(body[here:]))

    def receive(self) -> GroupMessage:
        """The next message of rank 0; waits for it without a timeout."""
        self._communicator.broadcast(torch.from_numpy(self._first), is_patient=True)
        (size,) = struct.unpack_from("<q", self._first.data)
        body = np.empty(size, dtype=np.uint8)
        here = min(size, FIRST_BYTES)
        body[:here] = self._first[:here]
        if size > here:
            self._communicator.broadcast(torch.from_numpy(body[here:]))
        return self._decoder.decode(_split(body.data))


def _join(frames: Sequence[bytes | memoryview]) -> np.ndarray:
    """Size of all, number of frames, their sizes, and themselves."""
    sizes = [len(frame) for frame in frames]
    head = struct.calcsize(f"<{2 + len(sizes)}q")
    body = np.empty(head + sum(sizes), dtype=np.uint8)
    struct.pack_into(f"<{2 + len(sizes)}q", body.data, 0, len(body), len(sizes), *sizes)
    begin = head
    for frame in frames:
        body[begin : begin + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
        begin += len(frame)
    return body


def _split(body: memoryview) -> list[memoryview]:
    _, count = struct.unpack_from("<qq", body)
    frames, begin = [], struct.calcsize(f"<{2 + count}q")
    for size in struct.unpack_from(f"<{count}q", body, 16):
        frames.append(body[begin : begin + size])
        begin += size
    return frames
