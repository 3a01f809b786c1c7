"""Cells of the matrix on a GGUF file and on an AWQ checkpoint of the embedded model; `make test-full` runs all rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.effort import effort
from tests.matrix.answers import Response
from tests.matrix.circumstances import CIRCUMSTANCES, Cell
from tests.matrix.features import FEATURES
from tests.matrix.serving import DRAFTING, Servers
from tests.matrix.table import NOT_APPLICABLE, REFUSED, cell_id
from tests.models.stored_models import LEAF_KINDS, make_leaf
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
ROWS = effort(("stream", "recompute"), tuple(row for row in CIRCUMSTANCES if row not in DRAFTING))  # heads are leaf's
PAIRS = [(row, feature) for row in ROWS for feature in FEATURES]
Served = tuple[Servers, dict[tuple[str, str], Response]]


@pytest.fixture(scope="module", params=LEAF_KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    servers = Servers(str(make_leaf(request.param, tmp_path_factory.mktemp(request.param))))
    yield servers, {}
    servers.close()


@pytest.mark.parametrize(
    ("circumstance", "feature"),
    [pytest.param(*pair, id=cell_id(*pair)) for pair in PAIRS if pair not in NOT_APPLICABLE and pair not in REFUSED],
)
def test_cell(served: Served, circumstance: str, feature: str):
    servers, alone = served
    CIRCUMSTANCES[circumstance].run(Cell(servers, feature, alone))
