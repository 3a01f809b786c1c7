"""Each kind of layer has its own blocks, manager and place in messages; a state is one block per sequence."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import (
    KINDS,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from quire.core.runner_output import ModelRunnerOutput
from quire.core.serial import MessageDecoder, MessageEncoder
from quire.errors import MessageError, UnsupportedError
from quire.kv_cache.block_demand import BlockDemand
from quire.kv_cache.planning import plan_kv_cache
from quire.kv_cache.single_type.managers import MANAGERS, make_manager
from quire.kv_cache.swap_pool import NO_HOST_BLOCK, SwappedBlocks
from quire.scheduler.scheduler import Scheduler
from tests.unit.kv_cache.test_groups import BLOCK_SIZE, MAX_MODEL_LEN, Rows
from tests.unit.scheduler.cache_groups import make_kv_cache_config, make_spec
from tests.unit.scheduler.harness import make_request

STATE = ("state", 8)
NAMES = ("full", "window", "chunk", "latent", "state")
MIXED = make_kv_cache_config(9, BLOCK_SIZE, [(name, 6) for name in NAMES])


def layers(num_attention: int, num_states: int, state: MambaSpec, attention: KVCacheSpec) -> dict[str, KVCacheSpec]:
    specs = {f"a{i}": attention for i in range(num_attention)}
    return {**specs, **{f"s{i}": state for i in range(num_states)}}


def test_a_page_of_each_kind_has_the_bytes_of_what_it_stores():
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype_bytes=2)
    latent = MLAAttentionSpec(block_size=16, head_size=576, dtype_bytes=2)
    state = MambaSpec(block_size=16, shapes=((3, 40), (8, 16)), dtype_bytes=(2, 4))
    assert full.page_size_bytes == 2 * 16 * 2 * 64 * 2  # keys and values
    assert latent.page_size_bytes == 16 * 576 * 2  # one vector a token
    assert state.tensor_bytes == (256, 512)  # 240 bytes, aligned; whatever the number of tokens
    assert state.page_size_bytes == 256 + 512
    assert [spec.most_blocks(8) for spec in (full, latent, state)] == [None, None, 2]


def test_every_kind_has_a_manager_and_crosses_in_messages():
    assert set(KINDS) == set(MANAGERS)
    decoded = MessageDecoder[KVCacheConfig](KVCacheConfig).decode(MessageEncoder().encode(MIXED))
    assert decoded == MIXED
    assert [type(group.spec) for group in decoded.groups] == list(KINDS)


def test_a_spec_of_an_older_recording_is_of_the_kind_whose_fields_are_set():
    old = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype_bytes": 4}
    groups = [
        {"layer_names": ["a"], "spec": {**old, "sliding_window": None, "attention_chunk_size": None}},
        {"layer_names": ["b"], "spec": {**old, "sliding_window": 6, "attention_chunk_size": None}},
        {"layer_names": ["c"], "spec": {**old, "sliding_window": None, "attention_chunk_size": 8}},
    ]
    config = MessageDecoder[KVCacheConfig](KVCacheConfig).decode(
        [msgspec.msgpack.encode({"num_blocks": 3, "groups": groups})]
    )
    assert [group.spec for group in config.groups] == [
        make_spec("full", 0, 4), make_spec("window", 6, 4), make_spec("chunk", 8, 4)
    ]  # fmt: skip


@pytest.mark.parametrize("spec", [3, {}, {"block_size": 4}, {"block_size": "4", "head_size": 1, "dtype_bytes": 1}])
def test_what_is_not_a_spec_is_a_malformed_message(spec):
    message = {"num_blocks": 3, "groups": [{"layer_names": ["a"], "spec": spec}]}
    with pytest.raises(MessageError):
        MessageDecoder[KVCacheConfig](KVCacheConfig).decode([msgspec.msgpack.encode(message)])


def test_a_kind_without_a_manager_is_refused_by_name():
    class OwnSpec(FullAttentionSpec):
        pass

    with pytest.raises(UnsupportedError, match="OwnSpec"):
        make_manager(OwnSpec(block_size=4, num_kv_heads=1, head_size=1, dtype_bytes=1), None, 0)  # type: ignore[arg-type]


def test_windows_and_states_make_groups_of_their_kinds():
    state = MambaSpec(block_size=16, shapes=((100,),), dtype_bytes=(4,))
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=16, dtype_bytes=2, sliding_window=32)
    kept = plan_kv_cache(layers(2, 3, state, window), 10**6, CacheConfig(), max_model_len=640)
    assert [type(group.spec) for group in kept.groups] == [SlidingWindowSpec, MambaSpec]
    masked = CacheConfig(disable_hybrid_kv_cache_manager=True)
    kept = plan_kv_cache(layers(2, 3, state, window), 10**6, masked, max_model_len=640)
    assert [type(group.spec) for group in kept.groups] == [FullAttentionSpec, MambaSpec]


def test_a_row_holds_one_page_of_state_however_long_it_grows():
    rows = Rows(("full", 0), STATE)
    rows.run(0, list(range(1, 41)))
    (full_ids, state_ids) = rows.kv.get_block_ids(0)
    assert len(full_ids) == 10 and len(state_ids) == 1 and state_ids[0] not in full_ids
    assert int(rows.kv.num_blocks_held(np.array(40)).sum()) == 12
    rows.kv.free(0)
    assert rows.kv.num_free_blocks == rows.kv.num_usable_blocks


def test_a_model_of_states_alone_runs_requests_of_any_length_in_one_page_each():
    rows = Rows(STATE, num_blocks=3)
    for row in (0, 1):
        rows.run(row, list(range(1, MAX_MODEL_LEN - row)))
    assert rows.kv.num_free_blocks == 0


def test_no_prefix_is_found_where_a_group_keeps_states():
    rows = Rows(("full", 0), STATE)
    tokens = list(range(1, 41))
    assert rows.run(0, tokens) == 0
    assert rows.kv.shared_prefix(0, 40) is None
    rows.kv.free(0)
    assert rows.run(1, tokens) == 0


def test_latent_attention_finds_prefixes_as_full_attention_does():
    rows = Rows(("latent", 16))
    tokens = list(range(1, 41))
    rows.run(0, tokens)
    rows.kv.free(0)
    assert rows.run(1, tokens) == 36


def test_a_swapped_state_comes_back_into_one_page():
    rows = Rows(("full", 0), STATE)
    request = rows.request(list(range(1, 41)))
    prefix = rows.kv.get_computed_blocks(request)
    swapped = SwappedBlocks(40, (np.arange(10, dtype=np.int32), np.array([10], dtype=np.int32)))
    assert NO_HOST_BLOCK not in swapped.held()
    assert rows.kv.demand(prefix, 41, swapped) == BlockDemand((12,))
    block_ids = rows.kv.place(2, request, prefix, 41, swapped)
    assert [len(ids) for ids in block_ids] == [11, 1]
    assert rows.kv.num_usable_blocks - rows.kv.num_free_blocks == 12


@pytest.mark.parametrize("groups", [[("full", 0), STATE], [STATE], [("window", 6), STATE]])
def test_a_scheduler_serves_more_requests_than_fit_with_states_and_gives_every_page_back(groups):
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
        CacheConfig(block_size=BLOCK_SIZE),
        make_kv_cache_config(14, BLOCK_SIZE, groups),
        max_model_len=40,
    )
    for handle in range(9):
        scheduler.add_request(make_request(handle, [handle + 1] * 12, max_tokens=8, ignore_eos=True))
    num_steps = num_sampled = 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        assert step is not None
        rows = step.output.rows[step.output.is_sampling]
        sampled = ModelRunnerOutput(rows=rows, sampled_token_ids=np.full(len(rows), 7, dtype=np.int32))
        scheduler.update_from_output(step, sampled)
        num_steps, num_sampled = num_steps + 1, num_sampled + len(rows)
        assert num_steps < 1000
    assert num_sampled == 9 * 8
    assert scheduler._kv.usage == 0
