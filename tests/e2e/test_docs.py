"""The Python blocks of the pages that people copy from run as they stand, and print what the pages say.

A `text` block after a Python block is what that prints; `...` stands for anything. A block without one has an assert.
Pages whose classes need an engine have tests of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTED_ELSEWHERE = {"connectors"}  # test_connector.py
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(*block, id=f"{page.stem} block {number}")
    for page in PAGES
    if page.stem not in TESTED_ELSEWHERE
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("block", "printed"), BLOCKS)
def test_a_block_does_what_its_page_says(block: str, printed: str, capsys):
    assert printed or "assert " in block, "a page shows what its blocks print, in a text block after them"
    exec(compile(block, "block", "exec"), {"__name__": "block"})
    pattern = ".*".join(map(re.escape, printed.split("...")))
    assert re.fullmatch(pattern, capsys.readouterr().out, re.DOTALL)
