"""Link: the way from a decode engine to one prefill engine, on a thread of its own, one job after the other.

Used by the worker's half of the connector. What is read is checked before it is written to the cache: the checksum of
each block, and at the end that the prefill engine has kept them until then. A peer that is slow, dead or wrong costs a
job, whose blocks are reported as lost; after a failed connection jobs fail at once for a while. Owns its connection.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import QuireError
from quire.kv_transfer.connector import BlockAccess
from quire.kv_transfer.pull.counts import Counts
from quire.kv_transfer.pull.messages import (
    PROTOCOL,
    Blocks,
    Challenge,
    Channel,
    Hello,
    PeerError,
    ReadBlocks,
    Release,
    Released,
    Welcome,
    check_proof,
)
from quire.kv_transfer.pull.params import RemotePrefill
from quire.kv_transfer.pull.server import IO_TIMEOUT_S, Identity, check_peer, checksums_of
from quire.kv_transfer.pull.transport import CacheMemory, Reader, Transport
from quire.logger import get_logger
from quire.utils.proofs import new_nonce, proof_of

logger = get_logger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""For which a peer that could not be reached is not tried again."""


@dataclass(slots=True)
class Job:
    """Blocks of a request to read, or to give up where there are none.

    Attributes:
        request_id: here.
        remote: where they are.
        first: number of the first block in the prompt.
        names, block_ids: their names, and where they go.
        deadline: `time.monotonic()` after which no request waits for them.
        is_cancelled: the request has ended.
    """

    request_id: str
    remote: RemotePrefill
    first: int = 0
    names: Sequence[bytes] = ()
    block_ids: Sequence[int] = ()
    deadline: float = float("inf")
    is_cancelled: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Local:
    """What the links of an engine share.

    Attributes:
        on_end: called with a job that has ended, and the blocks that could not be loaded.
    """

    identity: Identity
    transport: Transport
    blocks: BlockAccess
    memory: CacheMemory
    counts: Counts
    on_end: Callable[[Job, set[int]], None]


@dataclass(slots=True)
class _Connection:
    channel: Channel
    reader: Reader
    engine_id: str

    def close(self) -> None:
        self.channel.close()
        self.reader.close()


class Link:
    """Reads from the engine at `address`."""

    def __init__(self, address: tuple[str, int], local: Local) -> None:
        self._address = address
        self._local = local
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._connection: _Connection | None = None
        self._is_closed = False
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._num_begun = self._num_ended = 0  # each is written by one thread
        self._shapes: list[tuple[int, ...]] = []
        self._thread = threading.Thread(target=self._run, name=f"KV link to {address[0]}:{address[1]}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Begin a job, after those before it."""
        self._num_begun += 1
        self._jobs.put(job)

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._num_begun == self._num_ended

    def close(self, wait_s: float) -> None:
        """Stop, in the middle of a job if there is one; its blocks are lost."""
        self._is_closed = True
        self._jobs.put(None)
        connection = self._connection
        if connection is not None:
            connection.channel.close()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            lost = set(job.block_ids)
            try:
                lost = self._carry_out(job)
            except (OSError, QuireError) as error:
                self._disconnect()
                if not self._is_closed:
                    self._local.counts.add("failed_jobs")
                    logger.warning("KV blocks cannot be read from %s:%d: %s", *self._address, _text(error))
            except Exception:  # a transport is foreign code; its job ends all the same
                self._disconnect()
                self._local.counts.add("failed_jobs")
                logger.exception("KV blocks cannot be read from %s:%d", *self._address)
            self._local.on_end(job, lost)
            self._num_ended += 1
        self._disconnect()

    def _carry_out(self, job: Job) -> set[int]:
        """The blocks that could not be loaded."""
        if self._is_closed or time.monotonic() >= job.deadline:
            return set(job.block_ids)
        connection, is_new = self._connected(job)
        try:
            return self._transfer(connection, job)
        except OSError:
            if is_new or self._is_closed:
                raise
            self._disconnect()  # the other engine may have closed a connection that was idle, or have restarted
        return self._transfer(self._connected(job)[0], job)

    def _transfer(self, connection: _Connection, job: Job) -> set[int]:
        if connection.engine_id != job.remote.remote_engine_id:
            raise PeerError(
                f"engine {connection.engine_id} answers, not {job.remote.remote_engine_id}, which prefilled"
            )
        size, is_whole = self._local.memory.chunk_size, True
        for start in range(0, len(job.block_ids), size):
            if job.is_cancelled or self._is_closed:
                is_whole = False
                break
            self._bound(connection, job)
            self._read(connection, job, start, min(start + size, len(job.block_ids)))
        self._bound(connection, job)
        connection.channel.send(Release(job.remote.remote_request_id))
        was_held = connection.channel.expect(Released).was_held
        if is_whole and was_held:
            return set()
        if is_whole and job.block_ids:
            self._local.counts.add("expired_loads")
            logger.warning("request %s: the prefill engine has not kept its blocks long enough", job.request_id)
        return set(job.block_ids)

    def _bound(self, connection: _Connection, job: Job) -> None:
        left_s = job.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no request waits for the blocks any longer")
        connection.channel.timeout_s = min(IO_TIMEOUT_S, left_s)

    def _read(self, connection: _Connection, job: Job, start: int, end: int) -> None:
        """Load some of a job's blocks."""
        import torch  # late: the scheduler's half does without

        names, channel = list(job.names[start:end]), connection.channel
        channel.send(ReadBlocks(job.remote.remote_request_id, job.first + start, names))
        answer = channel.expect(Blocks)
        if not len(answer.block_ids) == len(answer.checksums) == len(names):
            raise PeerError(f"{len(answer.block_ids)} blocks were announced where {len(names)} were asked for")
        tensors = connection.reader.read(channel, answer)
        if checksums_of(names, tensors) != answer.checksums:
            self._local.counts.add("damaged_reads")
            raise PeerError("blocks were damaged on their way")
        self._local.blocks.write(
            job.block_ids[start:end],
            [
                torch.from_numpy(tensor.reshape(len(names), *shape))
                for tensor, shape in zip(tensors, self._block_shapes(), strict=True)
            ],
        )
        self._local.counts.add("read_bytes", sum(tensor.nbytes for tensor in tensors))

    def _block_shapes(self) -> list[tuple[int, ...]]:
        """Of one block in each tensor, in bytes, as `BlockAccess.read` has them."""
        if not self._shapes:
            self._shapes = [tuple(part.shape[1:]) for part in self._local.blocks.read([0])]
        return self._shapes

    def _connected(self, job: Job) -> tuple[_Connection, bool]:
        """A connection, and whether it is new."""
        if self._connection is not None:
            return self._connection, False
        if time.monotonic() < self._retry_at:
            raise ConnectionError("it could not be reached a moment ago")
        try:
            self._connection = self._connect(min(IO_TIMEOUT_S, max(0.01, job.deadline - time.monotonic())))
        except (OSError, QuireError):
            self._pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * self._pause_s))
            self._retry_at = time.monotonic() + self._pause_s
            raise
        self._pause_s = 0.0
        return self._connection, True

    def _connect(self, timeout_s: float) -> _Connection:
        own = self._local.identity
        channel = Channel(socket.create_connection(self._address, timeout_s), timeout_s)
        try:
            challenge, nonce = channel.expect(Challenge).nonce, new_nonce()
            proof = proof_of(own.key, "decode", challenge, nonce)
            channel.send(
                Hello(
                    protocol=PROTOCOL, engine_id=own.engine_id, transport=own.transport, layout=own.layout.to_json(),
                    nonce=nonce, proof=proof,
                )
            )  # fmt: skip
            welcome = channel.expect(Welcome)
            check_proof(welcome.proof, own.key, "prefill", challenge, nonce)
            check_peer(own, PROTOCOL, own.transport, welcome.layout)
            reader = self._local.transport.connect(welcome.transport, self._local.memory)
        except BaseException:
            channel.close()
            raise
        return _Connection(channel, reader, welcome.engine_id)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _text(error: Any) -> str:
    return str(getattr(error, "message", None) or error or type(error).__name__)
