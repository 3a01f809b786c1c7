"""Which tokens of a drafting model have keys and values, while blocks come, go, are shared, swapped and copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.core.kv_transfer import BlockTransfer, KVTransferMeta
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import BlockCopies, NewBlocks, NewRequestData, SchedulerOutput
from quire.worker.block_tables import BlockTables
from quire.worker.drafting.chain import Chains, ragged_tokens, share_budget
from quire.worker.drafting.pages import DraftPages

BLOCK_SIZE = 4
NONE = np.empty(0, dtype=np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Pages:
    """Pages of 4 tokens, with the messages that a scheduler would send."""

    def __init__(self) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype_bytes=4)
        group = KVCacheGroupSpec(layer_names=("target", "draft.layer"), spec=spec)
        config = KVCacheConfig(num_blocks=20, groups=(group,), num_swap_blocks=6)
        self.tables = BlockTables(config, max_num_seqs=4, max_model_len=32)
        self.pages = DraftPages(config, [0], self.tables, most_drafts=3)

    def send(self, **fields: Any) -> None:
        message: dict[str, Any] = {
            "step": 0, "freed_rows": NONE, "new_reqs": (), "new_blocks": (NewBlocks(NONE, NONE, NONE),), "rows": NONE,
            "num_scheduled_tokens": NONE, "num_computed_tokens": NONE, "is_prefill": np.empty(0, np.bool_),
            "is_sampling": np.empty(0, np.bool_), "total_num_scheduled_tokens": 0, **fields,
        }  # fmt: skip
        scheduled = SchedulerOutput(**message)
        for request in scheduled.new_reqs:
            self.tables.set_row(request.row, request.block_ids)
        self.tables.append(scheduled.new_blocks)
        self.pages.apply(scheduled)

    def place(self, row: int, num_computed: int, *block_ids: int, **fields: Any) -> None:
        request = NewRequestData(
            row=row, request_id="", token_ids=np.arange(10, dtype=np.int32), num_prompt_tokens=10,
            sampling_params=SamplingParams(), seed=0, eos_token_id=-1, block_ids=(ids(*block_ids),),
        )  # fmt: skip
        counts = {"rows": ids(row), "num_scheduled_tokens": ids(1), "num_computed_tokens": ids(num_computed)}
        self.send(new_reqs=(request,), **counts, **fields)

    def fill(self, row: int, start: int, end: int) -> None:
        positions = np.arange(start, end)
        self.pages.note(np.full(len(positions), row), positions)

    def filled(self, row: int) -> int:
        return int(self.pages.num_filled[row])


@pytest.fixture
def pages() -> Pages:
    return Pages()


def test_a_new_row_has_nothing_whatever_its_blocks_held_before(pages: Pages) -> None:
    pages.place(0, 0, 5, 6, 7)
    pages.fill(0, 0, 10)
    assert pages.filled(0) == 10
    pages.place(1, 0, 5, 6, 7)
    assert pages.filled(1) == 0


def test_of_a_cached_prefix_as_much_is_known_as_was_filled_without_a_gap(pages: Pages) -> None:
    pages.place(0, 0, 5, 6, 7)
    pages.fill(0, 0, 6)
    pages.place(1, 8, 5, 6, 8)
    assert pages.filled(1) == 6
    pages.fill(0, 6, 12)
    pages.place(2, 8, 5, 6, 9)
    assert pages.filled(2) == 8
    assert pages.filled(1) == 6, "what another row fills is only looked for when a row is placed"


def test_new_blocks_in_the_place_of_others_hold_nothing(pages: Pages) -> None:
    pages.place(0, 0, 5, 6, 7)
    pages.fill(0, 0, 9)
    pages.send(new_blocks=(NewBlocks(ids(0), ids(2), ids(11)),))
    assert pages.filled(0) == 8


def test_contents_that_are_copied_and_swapped_take_what_is_known_along(pages: Pages) -> None:
    pages.place(0, 0, 5, 6)
    pages.fill(0, 0, 6)
    pages.place(1, 6, 5, 9, block_copies=BlockCopies(ids(6), ids(9)))
    assert pages.filled(1) == 6
    pages.send(swap_outs=BlockCopies(ids(5, 6), ids(2, 3)))
    pages.place(2, 6, 14, 15, swap_ins=BlockCopies(ids(2, 3), ids(14, 15)))
    assert pages.filled(2) == 6


def test_blocks_from_behind_the_cache_hold_nothing_for_drafts(pages: Pages) -> None:
    pages.place(0, 0, 5, 6)
    pages.fill(0, 0, 8)
    loads = (BlockTransfer(1, (b"a",), ids(5)),)
    pages.place(1, 8, 5, 6, kv_transfers=KVTransferMeta(loads=loads))
    assert pages.filled(1) == 0


def test_drafts_that_stood_need_not_be_computed_again(pages: Pages) -> None:
    pages.place(0, 0, 5, 6, 7)
    pages.fill(0, 0, 5)
    pages.pages.note_drafts(ids(0), ids(41, 42, 43)[None], ids(2))
    token_ids = np.zeros((4, 33), dtype=np.int32)
    token_ids[0, 5:9] = 41, 42, 43, 44
    pages.pages.keep_right_drafts(ids(0), ids(9), token_ids)
    assert pages.filled(0) == 7, "the third draft was never computed"
    pages.pages.note_drafts(ids(0), ids(51, 52, 53)[None], ids(2))
    token_ids[0, 7:9] = 51, 0
    pages.pages.keep_right_drafts(ids(0), ids(9), token_ids)
    assert pages.filled(0) == 8
    pages.place(1, 8, 5, 6, 9)
    assert pages.filled(1) == 8


def test_a_draft_in_a_block_that_was_given_back_does_not_count(pages: Pages) -> None:
    pages.place(0, 0, 5, 6, 7)
    pages.fill(0, 0, 8)
    pages.pages.note_drafts(ids(0), ids(41, 42, 43)[None], ids(2))
    pages.send(new_blocks=(NewBlocks(ids(0), ids(2), ids(7)),))
    token_ids = np.zeros((4, 33), dtype=np.int32)
    token_ids[0, 8:10] = 41, 42
    pages.pages.keep_right_drafts(ids(0), ids(11), token_ids)
    assert pages.filled(0) == 8


def test_slots_out_of_place_are_of_their_row_alone(pages: Pages) -> None:
    pages.place(0, 0, 5, 6)
    pages.pages.note(ids(0, 0, 0, 0), np.arange(4), np.zeros(4, dtype=np.bool_))
    assert pages.filled(0) == 4
    pages.place(1, 4, 5, 8)
    assert pages.filled(1) == 0


def test_rows_that_miss_least_are_filled_first() -> None:
    assert share_budget(np.array([7, 1, 3, 9]), 12).tolist() == [7, 1, 3, 1]
    assert share_budget(np.array([7, 1]), 100).tolist() == [7, 1]
    assert share_budget(np.array([5, 5]), 4).tolist() == [4, 0]


def test_tokens_of_several_rows_lie_in_one_line() -> None:
    table = np.arange(40).reshape(4, 10)
    found = ragged_tokens(table, np.array([2, 0]), np.array([3, 8]), np.array([3, 1]))
    assert found.tolist() == [23, 24, 25, 8]


def test_a_chain_ends_at_its_limit_and_at_a_token_that_is_none() -> None:
    chains = Chains(np.array([2, 0, 3]))
    active = chains.extend(np.array([0, 2]), ids(7, 8), np.array([0.5, 0.25], dtype=np.float32))
    assert active.tolist() == [0, 2]
    active = chains.extend(active, ids(9, -1), np.array([0.5, 0.0], dtype=np.float32))
    assert active.tolist() == []
    drafts = chains.drafts()
    assert drafts.counts.tolist() == [2, 0, 1]
    assert drafts.token_ids.tolist() == [7, 9, 8]
    assert drafts.scores.tolist() == [0.5, 0.5, 0.25]


def test_a_chain_ends_behind_a_draft_that_is_unlikely_to_stand_with_all_before_it() -> None:
    chains = Chains(np.array([3, 3, 3]), least_chance=0.25)
    active = chains.extend(np.array([0, 1, 2]), ids(1, 2, 3), np.array([0.5, 0.25, 0.2], dtype=np.float32))
    assert active.tolist() == [0, 1]
    active = chains.extend(active, ids(4, 5), np.array([0.5, 0.9], dtype=np.float32))
    assert active.tolist() == [0], "0.5 * 0.5 is enough, 0.25 * 0.9 is not"
    assert chains.drafts().counts.tolist() == [2, 2, 1]
