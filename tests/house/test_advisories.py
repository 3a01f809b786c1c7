"""The page of advisories and the tests that bear their names agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/advisories.md").read_text()
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}
NAMED_AFTER = re.compile(r"test_\w*(?:cve_\d{4}_\d+|ghsa_\w{4}|vllm_\d+)")


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and not named - TESTS


def test_every_test_named_after_an_advisory_is_on_the_page():
    missing = {name for name in TESTS if NAMED_AFTER.match(name)} - set(re.findall(r"`(test_\w+)`", PAGE))
    assert not missing, f"give each a row in docs/reference/advisories.md: {missing}"


def test_every_row_about_what_exists_has_a_test_named_after_it():
    table = PAGE.partition("## Attacks on what exists")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(rows) >= 20
    for row in rows:
        numbers = re.findall(r"CVE-(\d{4})-(\d+)", row[0])
        words = [f"cve_{year}_{number}" for year, number in numbers] + [
            f"ghsa_{one}" for one in re.findall(r"GHSA-(\w{4})", row[0])
        ]
        words += [f"vllm_{one}" for one in re.findall(r"vllm#(\d+)", row[0])]
        assert any(word in row[2] for word in words), row[0]
