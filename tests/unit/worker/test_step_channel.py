"""Messages of rank 0 arrive as they were sent, whatever their size."""

from __future__ import annotations

import os
import threading

import numpy as np

from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.distributed.shared_memory import SharedMemoryCommunicator, make_region
from quire.kernels.native.runtime import NativeRuntime
from quire.worker.group_messages import CopyBlocks, ForwardStep, GroupMessage, InitCache, SampleLogits
from quire.worker.group_steps import StepTables
from quire.worker.step_channel import StepChannel

IDS = np.arange(7, dtype=np.int32)


def forward_step(num_tokens: int) -> ForwardStep:
    ids, positions = np.arange(num_tokens, dtype=np.int32), np.arange(num_tokens, dtype=np.int64)
    return ForwardStep(
        rows=IDS, num_computed_tokens=IDS, query_start_loc=IDS, seq_lens=IDS, input_ids=ids, token_rows=IDS[:3],
        token_positions=positions, logits_indices=positions, tables=[np.ones((3, 5), dtype=np.int32), IDS[:0]],
        slots=[positions, IDS[:0]], read_blocks=[IDS], write_blocks=[IDS], token_state_blocks=[], wants_all=True,
    )  # fmt: skip


def test_messages_arrive_as_they_were_sent_in_one_piece_or_more():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype_bytes=2)
    cache = KVCacheConfig(num_blocks=9, groups=(KVCacheGroupSpec(layer_names=("a", "b"), spec=spec),))
    sent: list[GroupMessage] = [InitCache(cache), SampleLogits(3, 64), CopyBlocks(IDS, IDS + 7)]
    sent += [forward_step(num_tokens) for num_tokens in (1, 5, 2048, 3)]
    fd, received = make_region(2, 1 << 16), []
    lead, other = (
        StepChannel(SharedMemoryCommunicator(NativeRuntime("portable"), fd, rank, 2, capacity=1 << 16))
        for rank in range(2)
    )
    os.close(fd)
    reader = threading.Thread(target=lambda: received.extend(other.receive() for _ in sent))
    reader.start()
    for message in sent:
        lead.send(message)
    reader.join()
    for before, after in zip(sent, received, strict=True):
        assert type(before) is type(after)
        assert str(before) == str(after)


def test_tables_of_a_message_can_be_given_to_kernels():
    """Wherever they lie in it."""
    step = forward_step(4)
    shifted = np.empty(4 * 8 + 1, dtype=np.uint8)[1:].view(np.int64)
    shifted[:] = step.slots[0]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype_bytes=2)
    tables = StepTables(KVCacheConfig(num_blocks=9, groups=(KVCacheGroupSpec(layer_names=("a",), spec=spec),)), 4, 32)
    step.slots[0] = shifted
    tables.take(step)
    slots = tables.slots(0, IDS, IDS)
    assert slots.flags.aligned and slots.flags.writeable and np.array_equal(slots, shifted)
    assert np.array_equal(tables.gather(0, IDS, 16), step.tables[0])
