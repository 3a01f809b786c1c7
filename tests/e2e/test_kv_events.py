"""KV events of a whole engine, as a consumer with plain ZMQ and plain MessagePack gets them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv_cache.block_hash import hash_full_blocks
from quire.kv_cache.event_recorder import external_hash

BLOCK_SIZE = 16
PROMPT = list(range(300, 340))
ONE = SamplingParams(max_tokens=1)


def test_what_an_engine_stores_and_forgets_is_published(tmp_path):
    address = f"ipc://{tmp_path}/events"
    config = {"enable_kv_cache_events": True, "endpoint": address, "topic": "kv"}
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
    socket.connect(address)

    def events() -> list[dict[str, object]]:
        topic, sequence, payload = socket.recv_multipart()
        numbers.append(int.from_bytes(sequence, "big"))
        _, batch, rank = msgspec.msgpack.decode(payload)
        assert (topic, rank) == (b"kv", 0)
        return list(batch)

    numbers: list[int] = []
    try:
        with LLM(
            "leaf", block_size=BLOCK_SIZE, num_gpu_blocks_override=8, kv_events_config=config, max_model_len=112
        ) as llm:
            assert events() == [{"type": "AllBlocksCleared"}]
            names = [external_hash(one) for one in hash_full_blocks(np.array(PROMPT, dtype=np.int32), BLOCK_SIZE, {})]
            llm.generate({"prompt_token_ids": PROMPT}, ONE, use_tqdm=False)
            (stored,) = events()
            assert (stored["type"], stored["block_hashes"], stored["token_ids"]) == ("BlockStored", names, PROMPT[:32])
            assert (stored["parent_block_hash"], stored["block_size"]) == (None, BLOCK_SIZE)
            llm.generate({"prompt_token_ids": [5] * 105}, ONE, use_tqdm=False)
            removed, *_ = events()
            assert removed["type"] == "BlockRemoved" and set(removed["block_hashes"]) <= set(names)
            assert llm.reset_prefix_cache()
            kinds = [event["type"] for event in events()]
            while "AllBlocksCleared" not in kinds:
                kinds = [event["type"] for event in events()]
            assert kinds == ["AllBlocksCleared"]
        assert numbers == list(range(len(numbers)))
    finally:
        socket.close(linger=0)
        context.term()


def test_events_without_a_cache_are_refused():
    with pytest.raises(ConfigError, match=r"needs enable_prefix_caching\nhint: enable prefix caching"):
        LLM("leaf", enable_prefix_caching=False, kv_events_config='{"enable_kv_cache_events": true}')
