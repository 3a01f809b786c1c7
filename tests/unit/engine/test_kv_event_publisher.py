"""The publisher against plain ZMQ sockets and plain MessagePack, as consumers have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.kv_events import KVEventsConfig, parse_kv_events_config
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec
from quire.engine.kv_event_publisher import NO_KV_EVENTS, KVEventPublisher, start_kv_events
from quire.errors import ConfigError, UnsupportedError
from quire.kv_cache.event_recorder import KVEventRecorder
from tests.unit.scheduler.cache_groups import make_spec

Message = tuple[bytes, int, list[Any]]


class Consumer:
    """Sockets of another program."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()

    def subscribe(self, endpoint: str, topic: str = "") -> zmq.Socket[bytes]:
        socket = self.socket(zmq.SUB)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        return socket

    def replay(self, endpoint: str, start: int, *before: bytes) -> list[tuple[int, bytes]]:
        """The answer to a replay request, up to its end; `before` is the empty frame that a REQ socket sends."""
        socket = self.socket(zmq.DEALER)
        socket.connect(endpoint)
        socket.send_multipart([*before, start.to_bytes(8, "big")])
        answer = []
        while True:
            *between, sequence, payload = socket.recv_multipart()
            assert between == list(before)
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                return answer
            answer.append((int.from_bytes(sequence, "big"), payload))


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    one = Consumer()
    yield one
    one.close()


@pytest.fixture
def publishers() -> Iterator[list[KVEventPublisher]]:
    started: list[KVEventPublisher] = []
    yield started
    for one in started:
        one.close()


def start(publishers: list[KVEventPublisher], **settings: Any) -> tuple[KVEventPublisher, KVEventRecorder]:
    recorder = KVEventRecorder(2)
    settings = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", **settings}
    publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **settings), recorder, clock=lambda: 7.5)
    publishers.append(publisher)
    return publisher, recorder


def receive(socket: zmq.Socket[bytes]) -> Message:
    topic, sequence, payload = socket.recv_multipart()
    assert len(sequence) == 8
    return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


def store(recorder: KVEventRecorder, number: int) -> None:
    recorder.note_stored(number.to_bytes(32, "big"), None, [number, number], ())


def hashes(batch: list[Any]) -> list[int]:
    return [name for event in batch[1] for name in event.get("block_hashes", ())]


def test_batches_come_in_order_with_topic_number_time_and_rank_after_all_was_cleared(consumer, publishers):
    publisher, recorder = start(publishers, topic="kv@here@leaf")
    socket = consumer.subscribe(publisher.endpoint, "kv@")
    assert receive(socket) == (b"kv@here@leaf", 0, [7.5, [{"type": "AllBlocksCleared"}], 0])
    for number in range(1, 40):
        store(recorder, number)
        if number > 1:
            recorder.note_removed((number - 1).to_bytes(32, "big"))
        publisher.flush()
    publisher.flush()  # nothing has happened
    for number in range(1, 40):
        _, sequence, (_, events, rank) = receive(socket)
        assert (sequence, rank) == (number, 0)
        assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved"][: min(number, 2)]
        assert events[0]["block_hashes"] == [number] and events[0]["token_ids"] == [number, number]
        assert set(events[0]) == {
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        }  # fmt: skip


@pytest.mark.parametrize("before", [[], [b""]], ids=["a DEALER", "as a REQ"])
def test_what_was_missed_is_sent_again_from_the_number_asked_for(consumer, publishers, before):
    publisher, recorder = start(publishers, buffer_steps=4)
    socket = consumer.subscribe(publisher.endpoint)
    receive(socket)
    for number in range(1, 7):
        store(recorder, number)
        publisher.flush()
        receive(socket)
    assert publisher.replay_endpoint is not None
    again = consumer.replay(publisher.replay_endpoint, 5, *before)
    assert [(sequence, hashes(msgspec.msgpack.decode(payload))) for sequence, payload in again] == [(5, [5]), (6, [6])]
    assert [sequence for sequence, _ in consumer.replay(publisher.replay_endpoint, 0, *before)] == [3, 4, 5, 6]
    assert consumer.replay(publisher.replay_endpoint, 100, *before) == []


def test_a_malformed_replay_request_is_ignored(consumer, publishers):
    publisher, _ = start(publishers)
    assert publisher.replay_endpoint is not None
    socket = consumer.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"", b"\0" * 8], [b"\0" * 9], [b""]):
        socket.send_multipart(frames)
    assert [sequence for sequence, _ in consumer.replay(publisher.replay_endpoint, 0)] == [0]
    assert not socket.poll(0)


def test_what_does_not_fit_is_dropped_and_consumers_start_anew(consumer, publishers, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(KVEventPublisher, "_wait_for_subscriber", lambda self: gate.wait(60) and None)
    publisher, recorder = start(publishers, max_queue_size=3)
    for number in range(1, 6):
        store(recorder, number)
        publisher.flush()
    assert publisher.num_dropped == 3
    assert (publisher.take_num_dropped(), publisher.take_num_dropped()) == (3, 0), "each is told once"
    socket = consumer.subscribe(publisher.endpoint)
    assert publisher._events.poll(60_000), "the subscription has come"
    gate.set()
    assert [hashes(receive(socket)[2]) for _ in range(3)] == [[], [1], [2]]
    store(recorder, 9)
    publisher.flush()
    _, sequence, (_, events, _) = receive(socket)
    assert sequence == 3 and [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


def test_nobody_listening_costs_nothing_but_the_kept_batches(publishers, monkeypatch):
    monkeypatch.setattr(KVEventPublisher, "_wait_for_subscriber", lambda self: None)
    publisher, recorder = start(publishers, buffer_steps=10)
    for number in range(500):
        store(recorder, number)
        publisher.flush()
    publisher.close()
    assert publisher.num_dropped == 0 and len(publisher._sent) == 10 and not publisher._queue
    publisher.flush()
    publisher.close()


def test_a_consumer_of_a_core_that_was_replaced_hears_that_all_was_cleared(consumer, publishers, tmp_path):
    address = f"ipc://{tmp_path}/events"
    first, recorder = start(publishers, endpoint=address, replay_endpoint=None)
    socket = consumer.subscribe(address)
    receive(socket)
    store(recorder, 1)
    first.flush()
    receive(socket)
    first.close()
    second, recorder = start(publishers, endpoint=address, replay_endpoint=None)
    store(recorder, 2)
    second.flush()
    assert receive(socket)[1:] == (0, [7.5, [{"type": "AllBlocksCleared"}], 0])
    assert hashes(receive(socket)[2]) == [2]


def test_an_address_that_is_taken_is_named(publishers):
    publisher, _ = start(publishers)
    with pytest.raises(ConfigError, match=r"cannot be published at tcp://127.*\nhint: use another endpoint"):
        start(publishers, endpoint=publisher.endpoint)

    with pytest.raises(ConfigError, match="use another endpoint"):
        start(publishers, endpoint="ipc://@quire-kv-test", replay_endpoint="ipc://@quire-kv-test")


def test_the_rank_is_added_to_the_port(publishers):
    first, _ = start(publishers)
    port = int(first.endpoint.rpartition(":")[2])
    config = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port - 3}")
    with pytest.raises(ConfigError, match=f":{port}: "):
        KVEventPublisher(config, KVEventRecorder(2), rank=3)


def kv_cache_config(*windows: int | None) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(
            layer_names=(f"layer{i}",),
            spec=make_spec("full", 0, 2) if window is None else make_spec("window", window, 2),
        )
        for i, window in enumerate(windows)
    ]
    return KVCacheConfig(num_blocks=4, groups=tuple(groups))


def test_events_are_made_only_where_somebody_may_listen():
    watched: list[KVEventRecorder] = []
    for config in (KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True, publisher="null")):
        assert start_kv_events(config, kv_cache_config(None), watched.append) is NO_KV_EVENTS
    assert not watched
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:0")
    with pytest.raises(UnsupportedError, match="windows.*\nhint: add disable_hybrid"):
        start_kv_events(config, kv_cache_config(4, 8), watched.append)
    events = start_kv_events(config, kv_cache_config(None, 8), watched.append)
    events.close()
    assert [recorder._group_idx for recorder in watched] == [0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"endpont": "x"}', "endpoint"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events"),
        ('{"publisher": "kafka"}', "publisher 'kafka' is not a known publisher"),
        (
            '{"endpoint": "localhost:5557"}',
            "endpoint 'localhost:5557' is not a valid address\nhint: use tcp://HOST:PORT",
        ),
        ('{"endpoint": "tcp://*:99999"}', "is not a valid address"),
        ('{"replay_endpoint": 5}', "replay_endpoint 5 is not a valid address"),
        ('{"hwm": 0}', "hwm"),
        ('{"buffer_steps": -1}', "buffer_steps"),
        ('{"topic": null, "max_queue_size": "many"}', "max_queue_size"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(text, match):
    with pytest.raises(ConfigError, match=match) as caught:
        parse_kv_events_config(text)
    assert caught.value.hint


def test_vllms_example_is_understood_and_the_default_is_the_loopback():
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    config = parse_kv_events_config(text)
    assert (config.enable_kv_cache_events, config.endpoint, config.topic) == (True, "tcp://*:5557", "kv")
    assert parse_kv_events_config(None).enable_kv_cache_events is False
    assert parse_kv_events_config("{}").endpoint == "tcp://127.0.0.1:5557"
