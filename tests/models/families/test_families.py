"""Every family, every check; and the page that says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.config.families.registry import FAMILIES
from tests.models.families.cases import CASES
from tests.models.families.checks import CHECKS, Subject
from tests.models.families.table import PAGE, render


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    case, path = CASES[request.param], tmp_path_factory.mktemp(request.param)
    yield Subject(case, path, case.write(path))


@pytest.mark.parametrize("check", CHECKS)
def test_family(subject: Subject, check: str):
    reason = subject.case.reasons.get(check)
    if reason is not None:
        pytest.skip(reason)
    CHECKS[check](subject)


def test_the_page_says_what_is_tested():
    assert PAGE.read_text() == render(), "run python -m tests.models.families.table"


def test_every_case_is_of_a_known_architecture():
    assert {name for case in CASES.values() for name in case.names} <= set(FAMILIES)
