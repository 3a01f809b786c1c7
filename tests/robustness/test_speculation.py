"""The long check of drafts in small: requests of every kind, by an oracle that errs now and then."""

from __future__ import annotations

from tests.robustness.speculated_requests import KINDS
from tests.robustness.speculation import ORACLE, PLAIN, differences
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries


def test_requests_of_every_kind_are_answered_with_the_same_bytes():
    num_compared, found = differences({"model": "leaf"}, len(KINDS), [ORACLE], [PLAIN, "preempted"])
    assert num_compared == 3 * len(KINDS) and not found, found
