"""Lines of log-probabilities become the values users read."""

from __future__ import annotations

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.engine.logprobs import LogprobsCollector, lines_by_entry, make_line
from tests.unit.engine.fakes import TOKENIZER, ids


def arrays(index, token_ids):
    shape = np.shape(token_ids)
    logprobs = np.where(np.array(token_ids) < 0, np.nan, -np.arange(1, shape[1] + 1, dtype=np.float32))
    return LogprobsArrays(np.array(index, np.int32), np.array(token_ids, np.int32), logprobs, np.ones(shape, np.int32))


def test_padding_is_left_out_and_the_first_token_stays_first():
    fox = ids(" a")[0]
    line = make_line(TOKENIZER, arrays([0], [[fox, 40, -1, -1]]), 0)
    assert list(line) == [fox, 40]
    assert line[fox].decoded_token == " a"
    assert not any(np.isnan(one.logprob) for one in line.values())


def test_a_sampled_token_among_the_top_appears_once():
    assert list(make_line(None, arrays([0], [[9, 8, 9]]), 0)) == [9, 8]


def test_prompt_lines_begin_with_none_and_come_in_order():
    collector = LogprobsCollector(None, wants_output=False, wants_prompt=True)
    collector.add_prompt(arrays([1, 2], [[5, 6], [7, 8]]))
    collector.add_prompt(arrays([3], [[9, -1]]))
    assert collector.prompt[0] is None
    assert [next(iter(line)) for line in collector.prompt[1:]] == [5, 7, 9]


def test_entries_find_their_lines():
    assert lines_by_entry(arrays([1, 4], [[5], [6]])) == {1: 0, 4: 1}
    assert lines_by_entry(None) == {}
