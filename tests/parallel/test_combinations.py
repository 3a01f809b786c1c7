"""A few of the draws of `make test-combinations`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.effort import effort
from tests.models.families.cases import CASES
from tests.parallel.combinations import Bench, draw

# Eight ranks that swap, with a tree of drafts; latents with whole experts; others.
DRAWN = effort(("1 9", "1 7"), tuple(f"1 {number}" for number in (2, 3, 10, 23, 33, 34)))


@pytest.mark.parametrize("drawn", DRAWN)
def test_settings_that_change_no_byte_change_none_together(tmp_path: Path, drawn: str):
    assert not Bench(tmp_path).differs(draw(random.Random(drawn), tuple(CASES)))
