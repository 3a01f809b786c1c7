from __future__ import annotations

import numpy as np
import pytest

from quire.core.engine_messages import FinishReason
from quire.core.request import Request
from quire.scheduler.request_table import RequestTable
from quire.scheduler.stop import Stop, find_stops
from tests.unit.scheduler.harness import EOS, make_request


def stops_after(num_output: int, token: int, **params: object) -> list[Stop]:
    """What `find_stops` says when the `num_output`-th output token is `token`."""
    table = RequestTable(1, 40)
    params = {"ignore_eos": False, "max_tokens": 10, **params}
    row = table.allocate(Request.from_message(make_request(0, 5, **params)), 0)  # type: ignore[arg-type]
    for i in range(num_output):
        table.append_tokens(np.array([row]), np.array([token if i == num_output - 1 else 30]))
    return find_stops(table, np.array([row]), np.array([token]))


@pytest.mark.parametrize(
    ("num_output", "token", "params", "expected"),
    [
        (3, 20, {}, None),
        (3, EOS, {}, (FinishReason.STOP, None)),
        (3, EOS, {"ignore_eos": True}, None),
        (3, 20, {"stop_token_ids": [19, 20]}, (FinishReason.STOP, 20)),
        (3, 20, {"stop_token_ids": [19, 20], "ignore_eos": True}, (FinishReason.STOP, 20)),
        (3, EOS, {"stop_token_ids": [EOS]}, (FinishReason.STOP, None)),
        (3, EOS, {"stop_token_ids": [EOS], "ignore_eos": True}, (FinishReason.STOP, EOS)),
        (10, 20, {}, (FinishReason.LENGTH, None)),
        (10, EOS, {}, (FinishReason.STOP, None)),
        (10, 20, {"stop_token_ids": [20]}, (FinishReason.STOP, 20)),
        (3, EOS, {"min_tokens": 4}, None),
        (4, EOS, {"min_tokens": 4}, (FinishReason.STOP, None)),
        (3, 20, {"min_tokens": 4, "stop_token_ids": [20]}, None),
        (4, 20, {"min_tokens": 4, "stop_token_ids": [20]}, (FinishReason.STOP, 20)),
        (35, 20, {"max_tokens": None}, (FinishReason.LENGTH, None)),
        (34, 20, {"max_tokens": None}, None),
    ],
)
def test_the_first_condition_that_holds_decides(num_output, token, params, expected):
    stops = stops_after(num_output, token, **params)
    assert [(stop.reason, stop.stop_token_id) for stop in stops] == ([] if expected is None else [expected])


def test_many_rows_are_judged_at_once_each_by_its_own_ids():
    table = RequestTable(4, 40)
    wishes = ([20], [21], None, [20, 21])
    rows = np.array(
        [
            table.allocate(Request.from_message(make_request(handle, 5, stop_token_ids=wish)), 0)
            for handle, wish in enumerate(wishes)
        ]
    )
    table.append_tokens(rows, np.full(4, 21))
    assert [stop.row for stop in find_stops(table, rows, np.full(4, 21))] == [rows[1], rows[3]]


def test_no_rows_no_stops():
    assert find_stops(RequestTable(1, 8), np.empty(0, np.int32), np.empty(0, np.int32)) == []
