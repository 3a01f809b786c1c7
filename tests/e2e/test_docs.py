"""The Python blocks of the pages that people copy from run as they stand, and print what the pages say.

A `text` block after a Python block is what that prints; `...` stands for anything. A block without one has an assert.
`make test-docs` runs these and all other blocks of the docs (tests/docs).
"""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block, blocks_of, pages
from tests.docs.session import matches

BLOCKS = [
    pytest.param(block, id=f"{page} line {block.line}")
    for page in pages()
    if page.startswith(("README", "docs/how-to"))
    for block in blocks_of(page)
    if block.language == "python" and not block.notes
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_does_what_its_page_says(block: Block, capsys):
    exec(compile("\n" * block.line + block.text, block.page, "exec"), {"__name__": "block"})
    assert matches(block.printed, capsys.readouterr().out)
