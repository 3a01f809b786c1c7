"""KVEventPublisher: events of the prefix cache to other programs, over ZMQ. Started by `core_factory`.

A message is (topic, sequence number as 8 bytes big endian, batch in msgpack). A thread of its own sends; the engine's
step only appends to a bounded queue. What does not fit is dropped and counted, and the next batch says first that all
was cleared, so that no consumer believes in blocks that are gone. Owns the thread, its sockets and the last batches.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from quire.config.kv_events import KVEventsConfig
from quire.core.kv_events import AllBlocksCleared, KVEvent, KVEventBatch
from quire.core.kv_spec import KVCacheConfig
from quire.errors import ConfigError, UnsupportedError
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.logger import get_logger

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
# A consumer of a core that was replaced reconnects within this time and receives all from the beginning.
FIRST_SUBSCRIBER_S = 1.0
CLOSE_TIMEOUT_S = 1.0

logger = get_logger(__name__)


class KVEventFlusher(Protocol):
    """What the engine core calls after each step."""

    def flush(self) -> None:
        """Hand on what has happened."""

    def take_num_dropped(self) -> int:
        """Batches that were not sent since the last call, because too many waited."""

    def close(self) -> None:
        """Nothing more will come; harmless when repeated."""


class NoKVEvents:
    """No subscriber."""

    def flush(self) -> None:
        """Do nothing."""

    def take_num_dropped(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Do nothing."""


NO_KV_EVENTS = NoKVEvents()


class KVEventPublisher:
    """Publishes what `recorder` has recorded; the first event is that all was cleared.

    Args:
        config: where to.
        recorder: emptied by `flush`.
        rank: data parallel rank: added to the port, and sent in every batch.
        clock: seconds, wall clock.

    Attributes:
        num_dropped: batches that were not sent because too many waited.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self, config: KVEventsConfig, recorder: KVEventRecorder, rank: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self.num_dropped = self._num_reported = 0
        self._config = config
        self._recorder = recorder
        self._rank = rank
        self._clock = clock
        self._topic = config.topic.encode()
        self._queue: deque[KVEventBatch] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._must_clear = True
        self._is_closing = False
        self._context = zmq.Context()
        self._events = self._bind(zmq.XPUB, config.endpoint)
        self._replay = None if config.replay_endpoint is None else self._bind(zmq.ROUTER, config.replay_endpoint)
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._waker_fd, False)
        self._append([])
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where the events are published."""
        return str(self._events.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        """Where past events can be asked for."""
        return None if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def flush(self) -> None:
        """Hand on what was recorded; returns at once."""
        events = self._recorder.take()
        if events and not self._is_closing:
            self._append(events)

    def take_num_dropped(self) -> int:
        """Batches that were not sent since the last call."""
        num_dropped, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
        return num_dropped

    def close(self) -> None:
        """Send what waits, for a second at most, and end; harmless when repeated."""
        if not self._is_closing:
            self._is_closing = True
            self._wake()
            self._thread.join(CLOSE_TIMEOUT_S)

    def _append(self, events: list[KVEvent]) -> None:
        if len(self._queue) >= self._config.max_queue_size:
            if not self.num_dropped:
                logger.warning("KV event queue full: dropping events; subscribers must resync")
            self.num_dropped += 1
            self._must_clear = True
            return
        if self._must_clear:
            events, self._must_clear = [AllBlocksCleared(), *events], False
        self._queue.append(KVEventBatch(self._clock(), events, self._rank))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # woken more often than it can count, or ended
            os.write(self._waker_fd, b"\0")

    # --- in the thread ---

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._config.hwm)
        address, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and int(port):
            endpoint = f"{address}:{int(port) + self._rank}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"KV events cannot be published at {endpoint}: {error.strerror}",
                hint="use another endpoint in kv_events_config", field="kv_events_config",
            ) from None  # fmt: skip
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            self._wait_for_subscriber()
            while self._queue or not self._is_closing:
                ready = dict(poller.poll())
                if self._wake_fd in ready:
                    os.read(self._wake_fd, 4096)
                if self._events in ready:
                    self._events.recv()  # a subscription, of which ZMQ itself takes care
                self._send_queue()
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
        except Exception:
            logger.exception("the KV event publisher failed: no more events are sent")
        finally:
            self._context.destroy(linger=100)
            os.close(self._wake_fd)

    def _wait_for_subscriber(self) -> None:
        """Hold the first batch back until someone listens, but not for long."""
        deadline = time.monotonic() + FIRST_SUBSCRIBER_S
        while not self._is_closing and time.monotonic() < deadline:
            if self._events.poll(20):
                return

    def _send_queue(self) -> None:
        while self._queue:
            payload = self._encoder.encode(self._queue.popleft())
            sequence = self._num_sent.to_bytes(SEQUENCE_BYTES, "big")
            self._num_sent += 1
            self._sent.append((sequence, payload))
            self._events.send_multipart((self._topic, sequence, payload))

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept batches from a sequence number on, then the end; to ZMQ's REQ (an empty frame) and DEALER."""
        client, *between, start = replay.recv_multipart()
        if len(start) != SEQUENCE_BYTES or between not in ([], [b""]):
            logger.warning("a replay request is one sequence number of %d bytes", SEQUENCE_BYTES)
            return
        for sequence, payload in self._sent:
            if sequence >= start:
                replay.send_multipart((client, *between, sequence, payload))
        replay.send_multipart((client, *between, END_OF_REPLAY, b""))


def start_kv_events(
    config: KVEventsConfig,
    kv_cache_config: KVCacheConfig,
    watch_blocks: Callable[[KVEventRecorder], None],
    rank: int = 0,
) -> KVEventFlusher:
    """Publish what becomes of blocks, as `config` says.

    Args:
        watch_blocks: has a recorder told.
        rank: data parallel rank: added to the ports, and sent in every batch.

    Raises:
        UnsupportedError: no layer of the model keeps whole sequences.
        ConfigError: an address cannot be bound.
    """
    if not config.enable_kv_cache_events or config.publisher == "null":
        return NO_KV_EVENTS
    groups = kv_cache_config.groups
    if not groups[0].spec.can_take_back:
        raise UnsupportedError(
            "kv_events_config: all layers of this model are recurrent, so no blocks of tokens are cached and "
            "there are no events", hint="leave out kv_events_config", field="kv_events_config",
        )  # fmt: skip
    if not groups[0].spec.keeps_sequence:
        raise UnsupportedError(
            "kv_events_config: all layers of this model have windows and free their blocks, for which there "
            "are no events",
            hint="add disable_hybrid_kv_cache_manager, which keeps all blocks", field="kv_events_config",
        )  # fmt: skip
    recorder = KVEventRecorder(kv_cache_config.block_size, 0 if len(groups) > 1 else None)
    publisher = KVEventPublisher(config, recorder, rank)
    watch_blocks(recorder)
    logger.info("KV events at %s, replay at %s", publisher.endpoint, publisher.replay_endpoint)
    return publisher
