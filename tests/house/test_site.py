"""The docs site, without mkdocs: its navigation, the links of its pages, and that nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^#{1,6} (.+?)(?: #+)?$", re.MULTILINE)


@cache
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "deploy/site/hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def settings() -> dict[str, Any]:
    text = re.sub(r"!!python/\S+.*", "slug", (ROOT / "mkdocs.yml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@cache
def page(uri: str) -> str:
    text: str = hooks().text_of(uri)
    return text


@cache
def anchors(uri: str) -> set[str]:
    """Names of the headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in HEADING.findall("".join(hooks().outside_code(page(uri))[::2])):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        name, number = slug, 0
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def test_the_navigation_has_every_page_once():
    nav = hooks().expanded(settings()["nav"], hooks().pages())
    shown = hooks().named(nav)
    assert sorted(shown) == sorted(set(shown)), "a page is named twice in mkdocs.yml"
    missing = set(hooks().pages()) - set(shown)
    assert not missing, f"give these a place under nav in mkdocs.yml: {sorted(missing)}"
    gone = [one for one in shown if not (ROOT / hooks().origin(one)).exists()]
    assert not gone, f"mkdocs.yml names pages that are gone: {gone}"


def test_every_page_has_one_title_that_begins_it():
    bad = [uri for uri in hooks().pages() if not page(uri).startswith("# ")]
    assert not bad, f"these begin without a heading: {bad}"


def test_links_to_headings_lead_to_one():
    wrong = []
    for uri in hooks().pages():
        text = "".join(hooks().outside_code(page(uri))[::2])
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)\s#]*)#([^)\s]+)\)", text):
            paths = hooks().linked_paths(f"[]({target})", hooks().origin(uri)) if target else {hooks().origin(uri)}
            aim = hooks().site_uri(*paths)
            if not aim.startswith("source/") and anchor not in anchors(aim):
                wrong.append(f"{uri}: {target}#{anchor}")
    assert not wrong, f"no such heading: {wrong}"


def test_a_link_leads_to_the_page_of_the_site_that_shows_the_file():
    text = "[a](../../quire/errors.py#L3) [b](serve.md#set-it) [c](../../ARCHITECTURE.md) [d](https://e.org/x.md)\n"
    shown = hooks().with_site_links(f"{text}```\n[e](f.md)\n```\n", "how-to/tools.md")
    links = "[a](../source/quire/errors.py.md) [b](serve.md#set-it) [c](../ARCHITECTURE.md) [d](https://e.org/x.md)\n"
    assert shown == f"{links}```\n[e](f.md)\n```\n"
    assert hooks().with_site_links("[a](docs/how-to/tools.md) [b](deploy)", "README.md") == (
        "[a](how-to/tools.md) [b](source/deploy/index.md)"
    )
    assert "# quire/errors.py" in hooks().source_page("quire/errors.py")
    assert "`systemd/`" in hooks().source_page("deploy")


def test_a_list_is_one_on_the_site_as_well():
    assert hooks().for_python_markdown("**Decision.**\n- a\n  - b\n```\n  - c\n```\n") == (
        "**Decision.**\n\n- a\n    - b\n```\n  - c\n```\n"
    )


def test_the_site_asks_nothing_of_the_network_and_its_build_is_pinned():
    assert settings()["theme"]["font"] is False and "offline" in settings()["plugins"]
    assert "http" not in re.sub(r"#.*", "", (ROOT / "mkdocs.yml").read_text())
    pins = (ROOT / "deploy/site/packages.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", one) for one in pins)
    wanted = re.search(r'^docs = \["(mkdocs-material==[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted and wanted[1] in pins, "pyproject's extra and deploy/site/packages.txt name other versions"
