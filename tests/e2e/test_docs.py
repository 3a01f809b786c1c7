"""The Python blocks of the pages that people copy from run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem} block {number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str):
    exec(compile(block, "block", "exec"), {"__name__": "block"})
