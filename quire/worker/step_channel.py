"""StepChannel: messages from rank 0 to the other ranks of a group, over their communicators.

A message is what `core.serial` makes of it: typed values and arrays, no code. Called by `group_lead`, `group_follower`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from quire.core.serial import MessageDecoder, MessageEncoder
from quire.distributed.communicator import Communicator
from quire.distributed.pipeline import PipelineStage
from quire.worker.group_messages import GroupMessage, StageReport

FIRST_BYTES = 4096  # of every message; most need no more


class StepChannel:
    """One end of the channel.

    Args:
        communicator: of the ranks of this pipeline stage; between messages its other operations run.
        stage: the way to those of other stages, each of which gets its messages apart; None = there are no others.
    """

    def __init__(self, communicator: Communicator, stage: PipelineStage | None = None) -> None:
        self._communicator = communicator
        self._stage = stage
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[GroupMessage] = MessageDecoder(GroupMessage)
        self._reports: MessageDecoder[StageReport] = MessageDecoder(StageReport)
        self._first = np.zeros(FIRST_BYTES, dtype=np.uint8)

    def send(self, message: GroupMessage) -> None:
        """From rank 0 to all others, of all stages."""
        body = _join(self._encoder.encode(message))
        self._write(body, self._communicator.broadcast)
        if self._stage is not None:
            for rank in range(self._stage.size, self._stage.communicator.size):
                self._write(body, partial(self._stage.communicator.send, to=rank))

    def send_to_stage(self, message: GroupMessage) -> None:
        """From rank 0 to the others of its stage."""
        if self._communicator.size > 1:
            self._write(_join(self._encoder.encode(message)), self._communicator.broadcast)

    def receive(self) -> GroupMessage:
        """The next message of rank 0; waits for it without a timeout."""
        if self._stage is None or self._stage.is_first:
            body = self._read(self._communicator.broadcast)
        else:
            body = self._read(partial(self._stage.communicator.receive, source=0))
        return self._decoder.decode(_split(body.data))

    def report(self, report: StageReport) -> None:
        """To rank 0, from the first rank of another stage."""
        assert self._stage is not None, "there are several"
        self._write(_join(self._encoder.encode(report)), partial(self._stage.communicator.send, to=0))

    def take_reports(self) -> list[StageReport]:
        """Rank 0: what the other stages report, in their order."""
        assert self._stage is not None, "there are several"
        communicator, reports = self._stage.communicator, []
        for rank in range(self._stage.size, communicator.size, self._stage.size):
            body = self._read(partial(communicator.receive, source=rank))
            reports.append(self._reports.decode(_split(body.data)))
        return reports

    def _write(self, body: np.ndarray, send: Callable[[torch.Tensor], None]) -> None:
        here = min(len(body), FIRST_BYTES)
        self._first[:here] = body[:here]
        send(torch.from_numpy(self._first))
        if len(body) > here:
            send(torch.from_numpy(body[here:]))

    def _read(self, receive: Callable[..., None]) -> np.ndarray:
        receive(torch.from_numpy(self._first), is_patient=True)
        (size,) = struct.unpack_from("<q", self._first.data)
        body = np.empty(size, dtype=np.uint8)
        here = min(size, FIRST_BYTES)
        body[:here] = self._first[:here]
        if size > here:
            receive(torch.from_numpy(body[here:]))
        return body


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
