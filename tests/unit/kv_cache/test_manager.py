from __future__ import annotations

import numpy as np
import pytest

from quire.core.engine_messages import EngineCoreRequest
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.errors import UnsupportedError
from quire.kv_cache.block_demand import BlockDemand
from quire.kv_cache.manager import KVCacheManager
from tests.unit.scheduler.cache_groups import FULL, make_kv_cache_config

BLOCK_SIZE = 4
GROUP = KVCacheGroupSpec(
    layer_names=("layer",), spec=FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype_bytes=4)
)


def make_manager(num_blocks: int = 12, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=num_blocks, groups=(GROUP,))
    return KVCacheManager(config, enable_prefix_caching=enable_prefix_caching, max_num_seqs=4, max_model_len=40)


def make_request(tokens: int | list[int], salt: str | None = None, **params: object) -> Request:
    token_ids = np.array(list(range(tokens)) if isinstance(tokens, int) else tokens, dtype=np.int32)
    message = EngineCoreRequest(
        handle=0, request_id="r", prompt_token_ids=token_ids, seed=0, cache_salt=salt,
        sampling_params=SamplingParams(max_tokens=4, **params),  # type: ignore[arg-type]
    )  # fmt: skip
    return Request.from_message(message)


class Rows:
    """Places requests on rows and pretends that all their tokens were computed."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.token_ids = np.zeros((4, 40), dtype=np.int32)

    def place(self, row: int, request: Request) -> np.ndarray:
        self.kv.note_arrival(request)
        prefix = self.kv.get_computed_blocks(request)
        return self.kv.place(row, request, prefix, len(request.token_ids))[0]

    def compute(self, row: int, request: Request) -> None:
        num_tokens = len(request.token_ids)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.kv.cache_full_blocks(np.array([row]), np.array([num_tokens]), self.token_ids)


def num_cached(kv: KVCacheManager, request: Request) -> int:
    kv.note_arrival(request)
    return kv.get_computed_blocks(request).num_tokens


@pytest.fixture
def filled() -> KVCacheManager:
    """A manager whose cache holds the blocks of 0, 1, ..., 9; nothing is in use."""
    kv = make_manager()
    rows = Rows(kv)
    rows.place(0, make_request(10))
    rows.compute(0, make_request(10))
    kv.free(0)
    return kv


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8), (12, 8)])
def test_a_hit_is_whole_pages_and_leaves_at_least_one_token_to_compute(filled, num_tokens, expected):
    assert num_cached(filled, make_request(num_tokens)) == expected


def test_a_prefix_hit_gives_the_very_same_pages():
    kv = make_manager()
    rows = Rows(kv)
    first = rows.place(0, make_request(10))
    rows.compute(0, make_request(10))
    second = rows.place(1, make_request(10))
    assert second[:2].tolist() == first[:2].tolist()
    assert second[2] != first[2]


def test_pages_that_are_not_computed_yet_are_not_found():
    kv = make_manager()
    Rows(kv).place(0, make_request(10))
    assert num_cached(kv, make_request(10)) == 0


def test_pages_are_found_as_they_become_full():
    kv = make_manager()
    rows = Rows(kv)
    rows.place(0, make_request(12))
    rows.token_ids[0, :12] = range(12)
    found = []
    for num_computed in (3, 4, 7, 8, 12):
        kv.cache_full_blocks(np.array([0]), np.array([num_computed]), rows.token_ids)
        found.append(num_cached(kv, make_request(13)))
    assert found == [0, 4, 4, 8, 12]


def test_generated_tokens_are_cached_when_their_page_is_full():
    kv = make_manager()
    rows = Rows(kv)
    request = make_request(6)
    rows.place(0, request)
    rows.token_ids[0, :9] = range(9)
    kv.cache_full_blocks(np.array([0]), np.array([8]), rows.token_ids)
    assert num_cached(kv, make_request(9)) == 8


@pytest.mark.parametrize("params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_who_may_not_read_the_cache_still_fills_it(params):
    kv = make_manager()
    rows = Rows(kv)
    request = make_request(10, **params)
    rows.place(0, request)
    rows.compute(0, request)
    assert num_cached(kv, make_request(10)) == 8
    assert num_cached(kv, make_request(10, **params)) == 0


def test_pages_computed_behind_a_hit_continue_the_cached_prefix(filled):
    rows = Rows(filled)
    longer = make_request(18)
    rows.place(1, longer)
    rows.compute(1, longer)
    assert num_cached(filled, make_request(19)) == 16
    assert num_cached(filled, make_request(9)) == 8


def test_pages_that_were_hit_keep_their_place_in_the_cache(filled):
    rows = Rows(filled)
    again = make_request(12)
    blocks = rows.place(1, again)
    rows.compute(1, again)
    found = filled.get_computed_blocks(make_request(12))
    assert found.block_ids[0].tolist() == blocks[:2].tolist()


def test_requests_share_pages_only_within_one_cache_salt(filled):
    assert num_cached(filled, make_request(10, salt="a")) == 0
    rows = Rows(filled)
    salted = make_request(10, salt="a")
    rows.place(1, salted)
    rows.compute(1, salted)
    assert num_cached(filled, make_request(10, salt="a")) == 8
    assert num_cached(filled, make_request(10, salt="b")) == 0


def test_without_prefix_caching_nothing_is_hashed_or_found():
    kv = make_manager(enable_prefix_caching=False)
    rows = Rows(kv)
    request = make_request(10)
    rows.place(0, request)
    rows.compute(0, request)
    assert request.block_tokens == [] and len(kv._pool.prefix_index.tree) == 0
    assert num_cached(kv, make_request(10)) == 0


def test_placing_counts_free_cached_pages_as_taken_and_pages_in_use_as_not(filled):
    request = make_request(10)
    filled.note_arrival(request)
    prefix = filled.get_computed_blocks(request)
    assert filled.demand(prefix, 10) == BlockDemand((3,))
    filled.place(0, request, prefix, 10)
    assert filled.num_free_blocks == 11 - 3
    assert filled.demand(prefix, 10) == BlockDemand((1,))


def test_pages_are_appended_to_many_rows_at_once():
    kv = make_manager(num_blocks=20)
    rows = Rows(kv)
    for row in range(3):
        rows.place(row, make_request([row] * 5))
    which, upto = np.array([2, 0]), np.array([17, 9])
    missing = kv.num_missing_blocks(which, upto)
    assert missing.tolist() == [[3, 1]]
    (new,) = kv.allocate(which, missing)
    assert new.rows.tolist() == [2, 2, 2, 0]
    assert new.columns.tolist() == [2, 3, 4, 2]
    assert kv.get_block_ids(2)[0].tolist()[2:] == new.block_ids.tolist()[:3]
    assert kv.num_missing_blocks(which, upto).tolist() == [[0, 0]]
    assert kv.num_missing_blocks(np.array([1]), np.array([1])).tolist() == [[0]]


def test_appending_nothing_gives_empty_arrays():
    kv = make_manager()
    (new,) = kv.allocate(np.empty(0, np.int32), np.empty((1, 0), np.int32))
    assert [len(new.rows), len(new.columns), len(new.block_ids)] == [0, 0, 0]


def test_freed_pages_are_free_and_their_row_can_be_used_again():
    kv = make_manager()
    rows = Rows(kv)
    rows.place(0, make_request(10))
    kv.free(0)
    assert kv.num_free_blocks == kv.num_usable_blocks == 11
    assert kv.usage == 0.0
    assert len(rows.place(0, make_request([7] * 5))) == 2


def test_two_requests_that_compute_the_same_prompt_side_by_side_both_finish_cleanly():
    kv = make_manager()
    rows = Rows(kv)
    for row in (0, 1):
        rows.place(row, make_request(10))
    for row in (0, 1):
        rows.compute(row, make_request(10))
    for row in (0, 1):
        kv.free(row)
    assert num_cached(kv, make_request(10)) == 8
    assert kv.reset_prefix_cache()
    assert num_cached(kv, make_request(10)) == 0


def test_the_longest_request_that_runs_alone_does_not_store_its_last_token():
    assert make_manager(num_blocks=4).max_tokens_per_request == 13


def test_groups_that_keep_whole_sequences_come_first():
    with pytest.raises(UnsupportedError, match="2 KV cache groups"):
        KVCacheManager(
            make_kv_cache_config(4, 4, (("window", 6), FULL)),
            enable_prefix_caching=True, max_num_seqs=1, max_model_len=8,
        )  # fmt: skip


@pytest.mark.parametrize(("free", "lacking"), [(15, 1), (16, 0), (17, 0)])
def test_a_demand_counts_what_is_left_for_running_requests(free, lacking):
    assert BlockDemand((6, 1)).beside((7, 0)).beside((3, 2)) == BlockDemand(new=(6, 1), reserved=(10, 2))
    assert BlockDemand((6,), (10,)).lacking((free,)) == lacking
