"""The text of an answer: streamed deltas join to it, stop texts end it, and nothing of a stop text is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.engine.detokenizer import Detokenizer
from tests.unit.engine.fakes import TOKENIZER, ids

TEXT = st.text(alphabet=st.sampled_from("ab 好🙂"), max_size=25)
STOPS = st.lists(st.text(alphabet=st.sampled_from("ab 好🙂"), min_size=1, max_size=4), max_size=3)


def stream(token_ids, params, chunk=1):
    """(shown deltas, stop text, tokens kept) of an answer that comes in chunks."""
    detokenizer = Detokenizer(TOKENIZER, params, [])
    shown, kept = [], 0
    for start in range(0, len(token_ids), chunk):
        stopped = detokenizer.push(token_ids[start : start + chunk])
        if stopped:
            return [*shown, detokenizer.take(delta=True)], stopped.stop, kept + stopped.num_tokens
        kept += len(token_ids[start : start + chunk])
        shown.append(detokenizer.take(delta=True))
    detokenizer.finish()
    return [*shown, detokenizer.take(delta=True)], None, kept


@settings(deadline=None, max_examples=200)
@given(text=TEXT, stops=STOPS, chunk=st.integers(1, 5))
def test_the_answer_ends_where_the_first_stop_text_begins(text, stops, chunk):
    shown, stop, kept = stream(ids(text), SamplingParams(stop=stops), chunk)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert "".join(shown) == (text[: min(ends)[1]] if ends else text)
    assert (stop is not None) == bool(ends)
    if ends:
        assert len(TOKENIZER.decode(ids(text)[: kept - 1]).rstrip("\ufffd")) < min(ends)[0]


@settings(deadline=None, max_examples=200)
@given(text=TEXT, stops=STOPS)
def test_a_shown_delta_is_never_taken_back(text, stops):
    shown, _, _ = stream(ids(text), SamplingParams(stop=stops))
    whole = "".join(shown)
    for end in range(len(shown)):
        assert whole.startswith("".join(shown[:end]))
    assert all(stop not in whole for stop in stops)


def test_the_stop_text_can_be_kept():
    params = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    shown, stop, _ = stream(ids("one END two"), params)
    assert ("".join(shown), stop) == ("one END", "END")


def test_text_that_did_not_become_a_stop_text_is_shown_at_the_end():
    shown, stop, _ = stream(ids("one EN"), SamplingParams(stop=["END"]))
    assert stop is None
    assert "EN" not in "".join(shown[:-1])
    assert "".join(shown) == "one EN"


def test_stop_texts_do_not_count_before_min_tokens():
    token_ids = ids("x") * 6
    shown, stop, kept = stream(token_ids, SamplingParams(stop=["x"], min_tokens=3))
    assert ("".join(shown), stop, kept) == ("xxx", "x", 4)


def test_the_token_that_ended_the_answer_is_no_text():
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(), [])
    detokenizer.push(ids("a") + ids("b"), is_last_hidden=True)
    assert detokenizer.take(delta=False) == "a"


def test_cumulative_text_holds_back_as_well():
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=["END"]), [])
    detokenizer.push(ids("one E"))
    assert detokenizer.take(delta=False) == "one "
    detokenizer.push(ids("x"))
    assert detokenizer.take(delta=False) == "one Ex"


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER], ids=["no-tokenizer", "not-wanted"])
def test_without_detokenization_there_is_no_text(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(detokenize=tokenizer is None), [])
    detokenizer.push([5, 6])
    detokenizer.finish()
    assert detokenizer.take(delta=False) == ""
