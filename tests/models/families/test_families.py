"""Every family, every check; and the page that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.families.registry import FAMILIES
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.models.families.checks import CHECKS, Subject
from tests.models.families.table import FOLDER, PAGES, render
from tests.models.families.through_transformers import THROUGH_TRANSFORMERS

SUBJECTS = {**CASES, **THROUGH_TRANSFORMERS}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    case, path = SUBJECTS[request.param], tmp_path_factory.mktemp(request.param)
    yield Subject(case, path, case.write(path))


@pytest.mark.parametrize("check", CHECKS)
def test_family(subject: Subject, check: str):
    reason = subject.case.reasons.get(check)
    if reason is not None:
        pytest.skip(reason)
    if subject.case.is_brief and check != "parity" and not effort(False, True):
        pytest.skip("part of make test-full")
    CHECKS[check](subject)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_says_what_is_tested(page: str):
    assert (FOLDER / page).read_text() == render(page), "run python -m tests.models.families.table"


def test_limits_on_queries_keys_and_values_equal_those_of_transformers(tmp_path: Path):
    fields = {**CASES["mpt"].fields, "attn_config": {"clip_qkv": 0.3}}
    case = dataclasses.replace(CASES["mpt"], fields=fields)
    CHECKS["parity"](Subject(case, tmp_path, case.write(tmp_path)))


def test_every_case_is_of_a_known_architecture():
    assert {name for case in CASES.values() for name in case.names} <= set(FAMILIES)


def test_classes_without_a_family_are_among_those_that_run_through_transformers():
    names = {name for case in THROUGH_TRANSFORMERS.values() for name in case.names}
    assert len(names - set(FAMILIES)) >= 6
