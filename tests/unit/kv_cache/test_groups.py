"""Several KV cache groups over one pool: what each holds, what is hit, what the pool gets back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.engine_messages import EngineCoreRequest
from quire.core.kv_spec import PoolSize
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import StateBlocks
from quire.kv_cache.block_hash import bytes_by_block
from quire.kv_cache.manager import NO_LIMIT, KVCacheManager
from tests.unit.scheduler.harness import FULL, Group, first_token_seen, make_kv_cache_config

BLOCK_SIZE = 4
MAX_MODEL_LEN = 120


class Rows:
    """A manager, and requests whose tokens are pretended to be computed in chunks."""

    def __init__(
        self,
        *groups: Group,
        num_blocks: int = 100,
        chunk: int = 8,
        caching: bool = True,
        more_pools: Sequence[PoolSize] = (),
    ) -> None:
        self.kv = KVCacheManager(
            make_kv_cache_config(num_blocks, BLOCK_SIZE, groups, more_pools=more_pools),
            enable_prefix_caching=caching, max_num_seqs=8, max_model_len=MAX_MODEL_LEN, max_chunk_tokens=chunk,
        )  # fmt: skip
        self.chunk = chunk
        self.token_ids = np.zeros((8, MAX_MODEL_LEN), dtype=np.int32)
        self.num_tokens = [0] * 8
        self.states: tuple[StateBlocks, ...] = ()

    def request(self, token_ids: list[int]) -> Request:
        message = EngineCoreRequest(
            handle=0, request_id="r", prompt_token_ids=np.array(token_ids, dtype=np.int32), seed=0,
            sampling_params=SamplingParams(max_tokens=4),
        )  # fmt: skip
        request = Request.from_message(message)
        self.kv.note_arrival(request)
        return request

    def run(self, row: int, token_ids: list[int], *, upto: int | None = None) -> int:
        """Place a request and compute it; tokens it found in the cache."""
        request = self.request(token_ids)
        prefix = self.kv.get_computed_blocks(request)
        num_tokens = len(token_ids) if upto is None else upto
        self.token_ids[row, : len(token_ids)] = token_ids
        computed = min(prefix.num_tokens + self.chunk, num_tokens)
        self.kv.place(row, request, prefix, computed)
        self.num_tokens[row] = num_tokens
        self.plan(row, prefix.num_tokens, computed)
        self.take_in(row, computed)
        while computed < num_tokens:
            self.advance(row, computed, n := min(self.chunk, num_tokens - computed))
            computed += n
        return prefix.num_tokens

    def advance(self, row: int, computed: int, num_tokens: int) -> None:
        rows, ends = np.array([row]), np.array([computed + num_tokens])
        self.kv.allocate(rows, self.kv.num_missing_blocks(rows, ends))
        self.kv.settle_states(rows, ends)
        self.plan(row, computed, computed + num_tokens)
        self.take_in(row, computed + num_tokens)

    def plan(self, row: int, start: int, end: int) -> None:
        self.num_tokens[row] = max(self.num_tokens[row], end)
        ends, lengths = np.array([end]), np.array([self.num_tokens[row]])
        self.states = self.kv.plan_states(np.array([row]), np.array([start]), ends, lengths)

    def take_in(self, row: int, computed: int) -> None:
        self.kv.cache_full_blocks(np.array([row]), np.array([computed]), self.token_ids)

    def blocks(self, token_ids: Iterable[int]) -> list[bytes]:
        return bytes_by_block(np.array(list(token_ids), dtype=np.int32).reshape(-1, BLOCK_SIZE))

    @property
    def num_used(self) -> int:
        return self.kv.num_usable_blocks - self.kv.num_free_blocks


def blocks(rows: Rows, row: int, group: int = 0) -> list[bool]:
    return [bool(block_id) for block_id in rows.kv.get_block_ids(row)[group]]


def test_a_window_gives_back_the_pages_it_has_passed():
    rows = Rows(("window", 6))
    rows.run(0, list(range(40)))
    # Token 39 saw 34 .. 39, which lie in blocks 8 and 9.
    assert blocks(rows, 0) == [False] * 8 + [True] * 2
    assert rows.num_used == 2


def test_a_finished_chunk_gives_back_its_pages():
    rows = Rows(("chunk", 16))
    rows.run(0, list(range(40)), upto=32)
    assert blocks(rows, 0) == [False] * 4 + [True] * 4  # token 31 saw its chunk
    rows.advance(0, 32, 1)
    assert blocks(rows, 0) == [False] * 8 + [True]


def test_groups_hold_pages_of_their_own_from_one_pool():
    rows = Rows(FULL, ("window", 6), ("chunk", 16))
    rows.run(0, list(range(40)))
    full, window, chunk = (ids[ids > 0].tolist() for ids in rows.kv.get_block_ids(0))
    assert [len(full), len(window), len(chunk)] == [10, 2, 2]
    assert len({*full, *window, *chunk}) == rows.num_used == 14
    rows.kv.free(0)
    assert rows.num_used == 0


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["window", "chunk"]), st.integers(1, 20), st.integers(1, 12),
    st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(0, 30),
)  # fmt: skip
def test_a_row_has_a_page_for_every_token_that_is_seen_and_never_more_than_is_said(kind, seen, chunk, steps, cached):
    rows = Rows((kind, seen), chunk=chunk)
    token_ids = list(range(MAX_MODEL_LEN))
    rows.run(1, token_ids, upto=max(cached, 1))
    request = rows.request(token_ids)
    prefix = rows.kv.get_computed_blocks(request)
    most = int(rows.kv.num_blocks_held(np.array(MAX_MODEL_LEN)).sum())
    computed = prefix.num_tokens
    rows.token_ids[0] = token_ids
    for i, step in enumerate(steps):
        end = min(computed + min(step, chunk), MAX_MODEL_LEN - 1)
        if i == 0:
            rows.kv.place(0, request, prefix, end)
        else:
            which = np.array([0])
            rows.kv.allocate(which, rows.kv.num_missing_blocks(which, np.array([end])))
        held = blocks(rows, 0)
        assert len(held) == -(-end // BLOCK_SIZE) and sum(held) <= most
        assert all(held[first_token_seen((kind, seen), computed) // BLOCK_SIZE :])
        rows.take_in(0, end)
        computed = end


def test_the_most_pages_that_are_said_are_needed():
    rows = Rows(("window", 6), chunk=8)
    rows.run(0, list(range(40)), upto=15)
    rows.advance(0, 15, 7)
    assert sum(blocks(rows, 0)) == 2
    held = [0]
    for start in range(22, 38):
        fresh = Rows(("window", 6), chunk=8)
        fresh.run(0, list(range(60)), upto=start)
        which = np.array([0])
        fresh.kv.allocate(which, fresh.kv.num_missing_blocks(which, np.array([start + 8])))
        held.append(sum(blocks(fresh, 0)))
    assert max(held) == int(rows.kv.num_blocks_held(np.array(MAX_MODEL_LEN)).sum())


def test_a_request_longer_than_all_pages_may_run_where_they_are_given_back():
    assert Rows(("window", 6), num_blocks=10).kv.max_tokens_per_request == NO_LIMIT
    # Six blocks are the window's, the other five are for whole sequences.
    assert int(Rows(("window", 6)).kv.num_blocks_held(np.array(MAX_MODEL_LEN)).sum()) == 5
    assert Rows(FULL, ("window", 6), num_blocks=13).kv.max_tokens_per_request == (12 - 5) * BLOCK_SIZE + 1
    assert Rows(FULL, ("window", 6), num_blocks=7).kv.max_tokens_per_request == 3 * BLOCK_SIZE + 1


@pytest.mark.parametrize("groups", [(("window", 6),), (FULL, ("window", 6)), (("chunk", 16), ("window", 3))])
def test_a_prompt_is_hit_behind_pages_that_are_gone(groups):
    rows = Rows(*groups)
    assert rows.run(0, list(range(40))) == 0
    rows.kv.free(0)
    assert rows.run(1, list(range(40))) == 36
    assert rows.run(2, [*range(30), 99, 98]) == 28
    assert rows.run(3, [7, *range(1, 40)]) == 0


def evict(rows: Rows, num_blocks: int) -> None:
    """Use blocks for something else, and give them back."""
    rows.kv._pool.free(rows.kv._pool.take(num_blocks))


def test_a_hit_is_as_long_as_all_groups_agree_on():
    rows = Rows(FULL, ("window", 6), num_blocks=31)
    rows.run(0, list(range(40)))  # the window's blocks of tokens 0 .. 31 are free, and cached
    evict(rows, rows.kv.num_free_blocks - 3)  # the last ones it passed remain
    rows.kv.free(0)
    assert rows.kv.get_computed_blocks(rows.request(list(range(60)))).num_tokens == 40
    assert rows.kv.get_computed_blocks(rows.request(list(range(35)))).num_tokens == 32
    # Blocks 5 .. 7 are left of those that were passed: a hit of 28 tokens needs 5 and 6, one of 20 needs 3 and 4.
    assert rows.kv.get_computed_blocks(rows.request(list(range(29)))).num_tokens == 28
    assert rows.kv.get_computed_blocks(rows.request(list(range(21)))).num_tokens == 0


def test_a_hit_that_one_group_shortens_is_shortened_again_by_another():
    rows = Rows(("window", 2), ("chunk", 16), num_blocks=60)
    rows.run(0, list(range(40)))
    rows.kv.free(0)
    index = rows.kv._pool.prefix_index
    window, chunk = index.blocks
    nodes = index.tree.walk(rows.blocks(range(40)), {}, 10)
    index.forget(np.array([window[nodes[i]] for i in (8, 9)] + [chunk[nodes[6]]]))
    # The window allows 8 blocks, for which the second chunk need not be cached but for its last block.
    assert rows.kv.get_computed_blocks(rows.request(list(range(60)))).num_tokens == 32
    index.forget(np.array([chunk[nodes[7]]]))
    # Without that block the chunk allows 6, and the window has their last block.
    assert rows.kv.get_computed_blocks(rows.request(list(range(60)))).num_tokens == 24
    index.forget(np.array([window[nodes[5]], chunk[nodes[4]]]))
    # The window allows 5, for which the chunk lacks block 4: so 4, where a chunk begins.
    assert rows.kv.get_computed_blocks(rows.request(list(range(60)))).num_tokens == 16


def test_a_placed_prefix_is_not_evicted_for_the_other_group():
    rows = Rows(FULL, ("window", 6), num_blocks=14)
    rows.run(0, list(range(16)))
    rows.kv.free(0)
    evict(rows, 0)
    request = rows.request(list(range(30)))
    prefix = rows.kv.get_computed_blocks(request)
    assert prefix.num_tokens == 16
    cached = {block_id for ids in prefix.block_ids for block_id in ids.tolist()}
    rows.kv.place(0, request, prefix, 24)
    held = [block_id for ids in rows.kv.get_block_ids(0) for block_id in ids.tolist() if block_id]
    assert cached <= set(held) and len(set(held)) == len(held)


def test_prefixes_go_with_the_last_page_and_the_last_memory_of_them():
    rows = Rows(("window", 6), num_blocks=30)
    index = rows.kv._pool.prefix_index
    tree = index.tree
    rows.run(0, list(range(40)))
    assert len(tree) == 10
    rows.kv.free(0)
    assert len(tree) == 10
    evict(rows, rows.kv.num_free_blocks - 1)  # the first block of the window is evicted last but one
    assert 0 < len(index) < 10 and len(tree) == 10, "what was evicted is remembered"
    index.past.clear()
    assert 0 < len(tree) < 10
    assert rows.kv.reset_prefix_cache()
    assert len(tree) == 0


def test_without_prefix_caching_nothing_is_named_or_found():
    rows = Rows(FULL, ("window", 6), caching=False)
    rows.run(0, list(range(40)))
    rows.kv.free(0)
    assert rows.kv._pool.num_cached_blocks == 0 and len(rows.kv._pool.prefix_index.tree) == 0
    assert rows.run(0, list(range(40))) == 0


def test_the_prompt_of_a_row_can_be_taken_over_in_the_step_after_it_was_computed_and_not_once_it_is_passed():
    rows = Rows(FULL, ("window", 6), ("chunk", 8))
    for num_tokens in range(8, 30):
        rows.run(0, list(range(num_tokens)))
        taken = rows.kv.shared_prefix(0, num_tokens - 1)
        assert taken is not None and taken.num_tokens == num_tokens - 1
        assert 0 not in taken.all_block_ids()
        rows.advance(0, num_tokens, 8)
        rows.advance(0, num_tokens + 8, 1)
        assert rows.kv.shared_prefix(0, num_tokens - 1) is None
        rows.kv.free(0)
