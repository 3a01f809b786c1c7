"""Calls of `collective_rpc`: every rank runs the same function, and rank 0 gathers what each returns.

Messages come between those of steps, so that all ranks are at the same one. A function that fails on a rank is answered
like one that does not: the ranks stay together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from quire.core.wire import ErrorInfo
from quire.core.worker_call import WorkerCall, answer_call
from quire.distributed.communicator import Communicator
from quire.errors import QuireServerError
from quire.worker.group_bytes import MAX_BYTES, receive_bytes, send_bytes
from quire.worker.group_lead import GroupLead
from quire.worker.group_messages import CallWorker


class RankReply(msgspec.Struct, frozen=True):
    """What a rank answers: a value, or an error."""

    value: Any = None
    error: ErrorInfo | None = None


class GroupCalls:
    """One rank's side.

    Args:
        communicator: between all ranks.
        lead: rank 0's way to the others.
        worker: of this rank.
    """

    def __init__(self, communicator: Communicator, lead: GroupLead, worker: Any) -> None:
        self._communicator = communicator
        self._lead = lead
        self._worker = worker

    def call(self, call: WorkerCall) -> list[Any]:
        """Rank 0: what each rank returns, in the order of ranks.

        Raises:
            QuireError: of the first rank on which the function failed, which is named.
        """
        with self._lead.together("collective_rpc"):
            self._lead.send(CallWorker(call))
            self._lead.take_all()
            replies = [reply_to(self._worker, call)]
            for rank in range(1, self._communicator.size):
                body = receive_bytes(self._communicator, rank, "an answer")
                replies.append(msgspec.msgpack.decode(body, type=RankReply))
        return values_of(replies)

    def follow(self, message: CallWorker) -> None:
        """Another rank: run it, and send what it returns."""
        body = msgspec.msgpack.encode(reply_to(self._worker, message.call))
        if len(body) > MAX_BYTES:
            too_large = ErrorInfo("ValidationError", f"the result has {len(body)} bytes, at most {MAX_BYTES} are sent")
            body = msgspec.msgpack.encode(RankReply(error=too_large))
        send_bytes(self._communicator, body)


def reply_to(worker: Any, call: WorkerCall) -> RankReply:
    """What a worker answers; errors are answers, too."""
    try:
        with torch.inference_mode():
            return RankReply(answer_call(worker, call))
    except Exception as error:
        return RankReply(error=ErrorInfo.of(error))


def values_of(replies: list[RankReply]) -> list[Any]:
    """The values; raises the first error, with its rank named."""
    for rank, reply in enumerate(replies):
        if reply.error is not None:
            named = reply.error.within(f"rank {rank}")
            raise named.to_error() if named.kind else QuireServerError(named.message, hint="see the function called")
    return [reply.value for reply in replies]
