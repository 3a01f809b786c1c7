"""Every feature in every circumstance: it works, or is refused by name, as the page of the matrix says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.effort import effort
from tests.matrix.answers import RefusedError, Response
from tests.matrix.circumstances import CIRCUMSTANCES, Cell
from tests.matrix.features import FEATURES
from tests.matrix.serving import DRAFTING, Servers
from tests.matrix.table import NOT_APPLICABLE, NOTES, PAGE, REFUSED, cell_id, render
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
PAIRS = [(circumstance, feature) for circumstance in CIRCUMSTANCES for feature in FEATURES]
NOT_NOW = effort({*DRAFTING} - {"drafts_eagle3", "drafts_suffix_else_eagle"}, set())


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Response]:
    return {}


@pytest.mark.parametrize(
    ("circumstance", "feature"),
    [pytest.param(*pair, id=cell_id(*pair)) for pair in PAIRS if pair not in NOT_APPLICABLE and pair[0] not in NOT_NOW],
)
def test_cell(servers, alone, circumstance, feature):
    meant = REFUSED.get((circumstance, feature))
    try:
        CIRCUMSTANCES[circumstance].run(Cell(servers, feature, alone))
    except RefusedError as refused:
        assert meant is not None, f"it is refused, and the table does not say so: {refused}"
        param, words = meant
        assert (refused.status, refused.error["param"]) == (400, param), refused
        assert words in refused.error["message"], refused
    else:
        assert meant is None, f"it works, and the table says that it is refused: {meant}"


def test_the_page_says_what_was_found():
    assert PAGE.read_text() == render(), "run: python -m tests.matrix.table"


def test_the_tables_speak_of_cells_that_there_are():
    assert REFUSED.keys() <= set(PAIRS) and NOT_APPLICABLE.keys() <= set(PAIRS)
    assert NOTES.keys() <= set(PAIRS)
    assert not REFUSED.keys() & NOT_APPLICABLE.keys() and not NOTES.keys() & NOT_APPLICABLE.keys()
