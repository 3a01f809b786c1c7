from __future__ import annotations

import numpy as np
import pytest

from quire.core.request import Request
from quire.scheduler.request_table import RequestTable, RowFlag, max_total_tokens
from tests.unit.scheduler.harness import EOS, make_request


def request(handle: int, prompt: int = 5, **params: object) -> Request:
    return Request.from_message(make_request(handle, prompt, **params), rank=handle + 100)  # type: ignore[arg-type]


def test_a_row_holds_what_a_step_needs_of_its_request():
    table = RequestTable(2, 20)
    row = table.allocate(request(7, 5, max_tokens=9, min_tokens=2, ignore_eos=False, stop_token_ids=[3]), 4)
    assert table.tokens_of(row).tolist() == request(7).token_ids.tolist()
    assert table.num_tokens[row] == table.num_prompt_tokens[row] == 5
    assert table.num_computed_tokens[row] == 4
    assert (table.min_total_tokens[row], table.max_total_tokens[row]) == (7, 14)
    assert table.eos_token_id[row] == EOS
    assert table.flags[row] == RowFlag.HAS_STOP_IDS
    assert (table.handle[row], table.rank[row]) == (7, 107)
    assert table.request_on(row).row == row


def test_a_row_used_again_keeps_nothing_of_its_last_request():
    table = RequestTable(1, 20)
    table.free(table.allocate(request(1, 9, ignore_eos=False, stop_token_ids=[3]), 8))
    row = table.allocate(request(2, 4), 0)
    assert table.tokens_of(row).tolist() == request(2, 4).token_ids.tolist()
    assert table.flags[row] == RowFlag.NONE
    assert table.eos_token_id[row] == -1
    assert table.num_computed_tokens[row] == 0


def test_rows_are_distinct_and_come_back():
    table = RequestTable(3, 20)
    requests = [request(handle) for handle in range(3)]
    assert sorted(table.allocate(each, 0) for each in requests) == [0, 1, 2]
    assert table.num_free_rows == 0
    freed = requests[1].row
    table.free(freed)
    assert requests[1].row == -1 and table.handle[freed] == -1
    assert table.allocate(request(9), 0) == freed


def test_a_free_row_has_no_request():
    with pytest.raises(AssertionError, match="only rows in use"):
        RequestTable(2, 20).request_on(0)


def test_tokens_are_appended_to_many_rows_at_once():
    table = RequestTable(3, 20)
    rows = [table.allocate(request(handle, 3 + handle), 0) for handle in range(3)]
    table.append_tokens(np.array([rows[2], rows[0]]), np.array([50, 60]))
    assert table.tokens_of(rows[2])[-1] == 50 and table.tokens_of(rows[0])[-1] == 60
    assert table.num_tokens[rows].tolist() == [4, 4, 6]


@pytest.mark.parametrize(("max_tokens", "expected"), [(4, 9), (100, 40), (None, 40)])
def test_a_request_ends_at_max_tokens_or_at_the_model_s_limit(max_tokens, expected):
    assert max_total_tokens(5, max_tokens, 40) == expected


def test_a_large_table_touches_no_memory_for_tokens_it_does_not_hold():
    table = RequestTable(4096, 1 << 20)
    assert table.token_ids.nbytes == 16 << 30
    assert table.allocate(request(0), 0) == 0
