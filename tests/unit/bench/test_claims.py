"""The page that `make bench-claims` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.bench_claims import PAGE, Claim, table, write_page


def test_figures_replace_those_of_the_page_and_nothing_else(tmp_path: Path):
    more = Claim("batching", "leaf", "tokens/s", 100.0, 250.0, True)
    less = Claim("prefix cache", "leaf", "ms", 90.0, 30.0, False)
    assert (more.ratio, less.ratio) == (2.5, 3.0)
    copy = tmp_path / "claims.md"
    copy.write_text(PAGE.read_text())
    for _ in range(2):
        write_page(copy, table([more, less], "here"))
    lines = copy.read_text().splitlines()
    assert "| batching | leaf | 100 | 250 tokens/s | 2.50 |" in lines
    assert len([line for line in lines if line.startswith("| prefix cache")]) == 1
    for part in (0, -1):
        assert copy.read_text().split("figures -->")[part] == PAGE.read_text().split("figures -->")[part]
    copy.write_text("# no marks\n")
    with pytest.raises(ValueError, match="has no"):
        write_page(copy, "x")
