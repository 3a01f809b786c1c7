"""Reads the docs site in headless Chromium, as files and without a network.

`drive_site.py SITE CHROMIUM`, with the Python of an environment that has playwright: opens every page of the
navigation's kinds, searches, changes to dark; fails where anything is asked for that is not a file of the site.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from playwright.sync_api import Page, Route, expect, sync_playwright

WORDS = {"preemption": "preempt", "speculative": "speculat", "systemd": "systemd"}


def search(page: Page, word: str, found: str) -> None:
    """The search finds pages, and the first leads to one with the word."""
    page.keyboard.press("/")
    page.get_by_role("textbox", name="Search").press_sequentially(word)
    results = page.locator(".md-search-result__link")
    expect(results.first).to_be_visible(timeout=30_000)
    assert results.count() >= 2, word
    results.first.click()
    expect(page.locator("article")).to_contain_text(found, ignore_case=True)


def main() -> int:
    """Exit code 0 when the site is whole."""
    site, chromium = Path(sys.argv[1]).resolve(), sys.argv[2]
    foreign: list[str] = []
    errors: list[str] = []

    def only_files(route: Route) -> None:
        url = route.request.url
        if url.startswith(("data:", "blob:", site.as_uri())):
            route.continue_()
        else:
            foreign.append(url)
            route.abort()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.route("**/*", only_files)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"{request.url}: {request.failure}"))
        page.goto((site / "index.html").as_uri())
        kinds = page.locator(".md-tabs__link")
        names = [name.strip() for name in kinds.all_inner_texts()]
        for number in range(len(names)):
            page.locator(".md-tabs__link").nth(number).click()
            expect(page.locator("article h1")).to_be_visible()
        for word, found in WORDS.items():
            search(page, word, found)
        dark = browser.new_page(color_scheme="dark")
        dark.route("**/*", only_files)
        dark.goto((site / "index.html").as_uri())
        expect(dark.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
        dark.locator("header label[title=Light]").click()
        expect(dark.locator("body")).to_have_attribute("data-md-color-scheme", "default")
        browser.close()
    print(json.dumps({"kinds": names, "searches": len(WORDS), "asked_elsewhere": foreign, "errors": errors}))
    return 1 if foreign or errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
