from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.metadata import AttentionMetadata, StateMetadata
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, PoolSize
from quire.core.scheduler_output import NewBlocks, SchedulerOutput, StateBlocks
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.kv_cache_tensors import CachePool
from quire.worker.prepare_inputs import prepare_inputs
from quire.worker.request_states import RequestStates
from tests.unit.scheduler.cache_groups import make_spec

NUM_ROWS, MAX_MODEL_LEN = 7, 50


def make_tables(block_sizes: tuple[int, ...] = (4, 8)) -> tuple[KVCacheConfig, BlockTables]:
    groups = tuple(
        KVCacheGroupSpec(
            layer_names=(f"layer{i}", f"layer{i + 2}"),
            spec=FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype_bytes=4),
        )
        for i, block_size in enumerate(block_sizes)
    )
    config = KVCacheConfig(num_blocks=100, groups=groups)
    return config, BlockTables(config, NUM_ROWS, MAX_MODEL_LEN)


def scheduled_step(rows: list[int], computed: list[int], counts: list[int], sampling: list[bool]) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        freed_rows=np.empty(0, dtype=np.int32),
        new_reqs=(),
        new_blocks=(),
        rows=np.array(rows, dtype=np.int32),
        num_scheduled_tokens=np.array(counts, dtype=np.int32),
        num_computed_tokens=np.array(computed, dtype=np.int32),
        is_prefill=np.array(counts) > 1,
        is_sampling=np.array(sampling, dtype=np.bool_),
        total_num_scheduled_tokens=sum(counts),
    )


REQUEST = st.tuples(st.integers(0, 30), st.integers(1, 19), st.booleans())


@settings(deadline=None, max_examples=100)
@given(st.permutations(range(NUM_ROWS)), st.lists(REQUEST, min_size=1, max_size=NUM_ROWS))
def test_inputs_match_a_loop_over_requests_and_tokens(
    permutation: list[int], requests: list[tuple[int, int, bool]]
) -> None:
    rows = permutation[: len(requests)]
    computed, counts, sampling = [list(column) for column in zip(*requests, strict=True)]
    states = RequestStates(NUM_ROWS, MAX_MODEL_LEN, 1000)
    states.token_ids[:] = np.arange(states.token_ids.size).reshape(states.token_ids.shape)
    config, tables = make_tables()
    for table in tables.tables:
        table[:] = np.arange(1, table.size + 1).reshape(table.shape)
    batch = prepare_inputs(scheduled_step(rows, computed, counts, sampling), states, torch.device("cpu"))
    context = AttentionGroups(config, [f"layer{i}" for i in range(4)], [torch.empty(0)] * 4, ()).forward_context(
        batch, tables
    )
    ids, positions, starts, logits = [], [], [0], []
    slots: list[list[int]] = [[], []]
    for i, row in enumerate(rows):
        for position in range(computed[i], computed[i] + counts[i]):
            ids.append(int(states.token_ids[row, position]))
            positions.append(position)
            for group, block_size in enumerate((4, 8)):
                block = int(tables.tables[group][row, position // block_size])
                slots[group].append(block * block_size + position % block_size)
        starts.append(len(ids))
        if sampling[i]:
            logits.append(len(ids) - 1)
    assert batch.input_ids.tolist() == ids and batch.positions.tolist() == positions
    assert batch.query_start_loc.tolist() == starts and batch.logits_indices.tolist() == logits
    seq_lens = [a + b for a, b in zip(computed, counts, strict=True)]
    assert batch.seq_lens.tolist() == seq_lens
    assert batch.sampling_rows.tolist() == [row for row, wanted in zip(rows, sampling, strict=True) if wanted]
    assert batch.sampling_positions.tolist() == [n for n, wanted in zip(seq_lens, sampling, strict=True) if wanted]
    assert context.metadata[0] is context.metadata[2] and context.metadata[1] is context.metadata[3]
    for group, block_size in enumerate((4, 8)):
        metadata = context.metadata[group]
        assert metadata.slot_mapping.tolist() == slots[group]
        assert metadata.block_table.shape == (len(rows), -(-max(seq_lens) // block_size))
        assert (metadata.block_table[0].numpy() == tables.tables[group][rows[0]][: metadata.block_table.shape[1]]).all()
        assert metadata.max_seq_len == max(seq_lens) and metadata.max_query_len == max(counts)
        assert metadata.num_reqs == len(rows) and metadata.num_tokens == len(ids)


def test_placing_a_request_clears_what_the_row_held() -> None:
    _, tables = make_tables((4,))
    tables.set_row(2, (np.arange(1, 9, dtype=np.int32),))
    tables.set_row(2, (np.array([30, 31], dtype=np.int32),))
    tables.append((NewBlocks(*np.array([[2, 3], [2, 0], [40, 41]], dtype=np.int32)),))
    assert tables.tables[0][2].tolist() == [30, 31, 40] + [0] * 10
    assert tables.tables[0][3, 0] == 41


def test_tables_number_blocks_within_their_pools_and_states_come_with_the_step() -> None:
    groups = tuple(
        KVCacheGroupSpec(layer_names=(kind,), spec=make_spec(kind, 8, 4), pool=pool)
        for pool, kind in enumerate(("full", "latent", "state"))
    )
    sizes = tuple(PoolSize(num_blocks=num_blocks) for num_blocks in (20, 10, 5))
    tables = BlockTables(KVCacheConfig(num_blocks=35, groups=groups, pools=sizes), 4, 16)
    tables.set_row(2, (np.array([3, 0, 5], np.int32), np.array([21, 0, 29], np.int32), np.array([31], np.int32)))
    none = np.empty(0, dtype=np.int32)
    new = NewBlocks(*np.array([[2], [3], [22]], dtype=np.int32))
    tables.append((NewBlocks(none, none, none), new, NewBlocks(none, none, none)))
    assert [table[2].tolist() for table in tables.tables] == [[3, 0, 5, 0], [1, 0, 9, 2], []]
    (states,) = tables.states((StateBlocks(np.array([-1, 31], np.int32), np.array([33, 31], np.int32)),))
    assert (states.read_block_ids.tolist(), states.write_block_ids.tolist()) == ([-1, 1], [3, 1])


@pytest.mark.parametrize("with_drafts", [False, True])
def test_layers_of_some_groups_are_given_the_states_of_their_own(with_drafts: bool) -> None:
    kinds = ("state", "full", "state", "state")
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer{i}",), spec=make_spec(kind, 8, 4)) for i, kind in enumerate(kinds)
    )
    config = KVCacheConfig(num_blocks=40, groups=groups)
    tables = BlockTables(config, NUM_ROWS, MAX_MODEL_LEN)
    requests = RequestStates(NUM_ROWS, MAX_MODEL_LEN, 1000)
    batch = prepare_inputs(scheduled_step([2], [4], [2], [True]), requests, torch.device("cpu"))
    blocks = [
        np.array([number], np.int32) for number in (7, 8, 9)
    ]  # of the first, the second and the third with states
    token_blocks = tuple(np.array([-1, 10 * int(block[0])], np.int32) for block in blocks) if with_drafts else ()
    states = tuple(StateBlocks(block, block) for block in blocks)
    batch = dataclasses.replace(batch, states=states, token_state_blocks=token_blocks)
    cache = torch.empty(0)
    for chosen, numbers in (((0, 1, 2, 3), (7, None, 8, 9)), ((1, 3), (None, 9)), ((3, 2), (9, 8)), ((1,), (None,))):
        names, caches, pools = [f"layer{i}" for i in chosen], [cache] * len(chosen), [CachePool((cache,), 0, 40)]
        context = AttentionGroups(config, names, caches, pools).forward_context(batch, tables)
        for metadata, number in zip(context.metadata, numbers, strict=True):
            if number is None:
                assert isinstance(metadata, AttentionMetadata)
                continue
            assert isinstance(metadata, StateMetadata) and metadata.write_block.tolist() == [number]
            assert (metadata.token_block is None) is (not with_drafts)
            assert metadata.token_block is None or metadata.token_block.tolist() == [-1, 10 * number]
