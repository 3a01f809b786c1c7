"""The long check of drafts in small: requests of every kind, by an oracle that errs and by every method."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.effort import effort
from tests.robustness.drafting_methods import METHODS, ORACLE
from tests.robustness.speculated_requests import KINDS
from tests.robustness.speculation import (
    CIRCUMSTANCES,
    KILLED,
    LEAF,
    PLAIN,
    PREEMPTED,
    Bench,
    Outcome,
    make_target,
    unproven,
)
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
COUNT = effort(1, 6) * len(KINDS)
OTHERS = [method for method in METHODS if method != ORACLE]
CHAIN = OTHERS[-1]
CELLS = effort(
    [("medusa", PREEMPTED), ("mtp", PREEMPTED), (CHAIN, PREEMPTED), (CHAIN, KILLED)],
    [(method, circumstance) for method in OTHERS for circumstance in CIRCUMSTANCES],
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory: Path = tmp_path_factory.mktemp("drafters")
    return Bench(make_target(LEAF, directory), COUNT, directory)


@pytest.mark.parametrize("circumstance", [PLAIN, PREEMPTED])
def test_requests_of_every_kind_are_answered_with_the_same_bytes(bench: Bench, circumstance: str):
    outcome = bench.run(ORACLE, circumstance)
    assert not +outcome.different and not outcome.wrong
    assert {one.kind for one in bench.requests} == set(KINDS)
    assert all(0 < outcome.accepted[kind] < outcome.drafted[kind] for kind in KINDS), outcome


@pytest.mark.parametrize(("method", "circumstance"), CELLS)
def test_every_method_gives_the_same_bytes(bench: Bench, method: str, circumstance: str):
    outcome = bench.run(method, circumstance)
    assert not +outcome.different and not outcome.wrong
    assert not unproven([outcome], bench.requests)


def test_methods_that_prove_nothing_are_found(bench: Bench):
    kinds = Counter(dict.fromkeys(KINDS, 3))
    never_drafted, never_right, never_wrong = Outcome(), Outcome(drafted=kinds), Outcome(drafted=kinds, accepted=kinds)
    for outcome in (never_drafted, never_right, never_wrong):
        assert unproven([outcome], bench.requests)
    assert not unproven([never_right, never_wrong], bench.requests)
