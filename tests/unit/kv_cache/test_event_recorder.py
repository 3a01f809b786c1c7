from __future__ import annotations

import msgspec
import numpy as np

from quire.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from quire.kv_cache.block_hash import hash_full_blocks
from quire.kv_cache.event_recorder import KVEventRecorder, external_hash
from quire.kv_cache.prefix_index import PrefixIndex
from tests.unit.kv_cache.test_prefix_index import publish as publish_sequence


def watched() -> tuple[PrefixIndex, KVEventRecorder]:
    index, recorder = PrefixIndex(8), KVEventRecorder(2)
    index.subscribe(recorder)
    return index, recorder


def publish(index: PrefixIndex, block_ids: list[int], tokens: list[int], keys=None) -> list[int]:
    """Names of the blocks, as others know them."""
    token_ids = np.array(tokens, dtype=np.int32)
    publish_sequence(index, block_ids, token_ids, keys)
    return [external_hash(one) for one in hash_full_blocks(token_ids, 2, keys or {})]


def test_pages_that_follow_one_another_are_one_event():
    index, recorder = watched()
    first, second = publish(index, [1, 2], [1, 2, 3, 4])
    assert recorder.take() == [BlockStored([first, second], None, [1, 2, 3, 4], 2, None, "GPU", None)]
    assert recorder.take() == []


def test_a_page_after_a_known_one_names_its_parent():
    index, recorder = watched()
    first, *_ = publish(index, [1], [1, 2])
    recorder.take()
    _, second = publish(index, [3, 2], [1, 2, 3, 4])
    assert recorder.take() == [BlockStored([second], first, [3, 4], 2, None, "GPU", None)]


def test_pages_of_other_salts_say_so():
    index, recorder = watched()
    keys = {0: (("cache_salt", "s"),)}
    first, second = publish(index, [1, 2], [1, 2, 3, 4], keys)
    events = recorder.take()
    assert [(event.block_hashes, event.extra_keys) for event in events if isinstance(event, BlockStored)] == [
        ([first], [["cache_salt", "s"]]), ([second], None),
    ]  # fmt: skip


def test_forgotten_pages_and_those_after_them_are_removed_in_order():
    index, recorder = watched()
    names = publish(index, [1, 2, 3], [1, 2, 3, 4, 5, 6])
    recorder.take()
    index.forget(np.array([2]))
    publish(index, [4], [7, 8])
    kinds = recorder.take()
    assert kinds[0] == BlockRemoved(names[1:], "GPU") and isinstance(kinds[1], BlockStored)
    index.clear()
    assert recorder.take() == [AllBlocksCleared()]


def test_a_group_names_itself_where_there_are_several():
    recorder = KVEventRecorder(2, group_idx=0)
    recorder.note_stored(b"\0" * 7 + b"\1", None, [1, 2], ())
    recorder.note_removed(b"\0" * 7 + b"\1")
    assert [event.group_idx for event in recorder.take() if not isinstance(event, AllBlocksCleared)] == [0, 0]


def test_on_the_wire_a_batch_is_an_array_and_an_event_a_map():
    events: list[KVEvent] = [
        BlockStored([2**63 + 1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None),
        BlockRemoved([5], "GPU"),
        AllBlocksCleared(),
    ]
    batch = KVEventBatch(12.5, events)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert plain == [
        12.5,
        [
            {
                "type": "BlockStored", "block_hashes": [2**63 + 1, 5], "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]  # fmt: skip
