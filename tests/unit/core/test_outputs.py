from __future__ import annotations

import pytest

from quire.core.draft_stats import DraftStats
from quire.core.outputs import CompletionOutput, Logprob


def test_answers_are_equal_whatever_was_drafted_for_them():
    answer = {"index": 0, "text": "a", "token_ids": [3], "logprobs": [{3: Logprob(-1.0)}], "finish_reason": "stop"}
    one, other = CompletionOutput(**answer), CompletionOutput(**answer, spec_decode_metrics=DraftStats(num_steps=1))
    assert one == other and one != CompletionOutput(**{**answer, "text": "b"})
    assert one != CompletionOutput(**{**answer, "logprobs": [{3: Logprob(-1.5)}]}) and one != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
