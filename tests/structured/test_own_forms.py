"""Patterns and grammars of our own: the libraries allow exactly what `re` and `lark` do."""

from __future__ import annotations

import pytest

from tests.structured.libraries import needs_libraries
from tests.structured.own_forms import GRAMMARS, differences, patterns

pytestmark = needs_libraries


def test_what_a_library_allows_is_what_an_independent_judge_allows():
    pytest.importorskip("lark")
    num_accepted, refused, wrong = differences(num_walks=4)
    assert wrong == []
    assert refused == []
    assert num_accepted == len(patterns()) + 2 * len(GRAMMARS) >= 150
