"""Stop texts are found at the same place however the text is cut, and their beginnings are held back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.stop_strings import StopSearch

LETTERS = st.text(alphabet="ab", max_size=25)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text, stops):
    """(end, start) of the match that ends first, the longest of those; by trying every end."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, min(starts)
    return None


@settings(deadline=None, max_examples=300)
@given(text=LETTERS, stops=STOPS, cuts=st.sets(st.integers(0, 25)))
def test_the_match_does_not_depend_on_the_cuts(text, stops, cuts):
    search = StopSearch(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = None
    for start, end in zip(bounds, bounds[1:], strict=False):
        found = search.push(text[start:end])
        if found:
            break
    assert (found and (found.end, found.start)) == expected(text, stops)
    assert found is None or text[found.start : found.end] == found.stop


@settings(deadline=None, max_examples=300)
@given(text=LETTERS, stops=STOPS)
def test_exactly_what_could_become_a_stop_text_is_held_back(text, stops):
    search = StopSearch(stops)
    if search.push(text) is None:
        beginnings = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert search.num_undecided() == max(beginnings, default=0)


@pytest.mark.parametrize(("skipped", "then", "is_found"), [("END", "", False), ("EN", "D", True), ("", "END", True)])
def test_a_match_must_end_after_the_skipped_text(skipped, then, is_found):
    search = StopSearch(["END", "a longer one"])
    search.skip(skipped)
    assert (search.push(then) is not None) == is_found
