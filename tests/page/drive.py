"""Drives the page in headless Chromium: every tab, accessibility, frames a second, screenshots.

Run by `tests.page.run` with the Python of an environment that has playwright:
`drive.py URL CHROMIUM AXE.js SCREENSHOTS`; prints what was found as one line of JSON, and fails on what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

TABS = ("Chat", "Engine", "Requests", "Plan", "Metrics", "Config")
SERIOUS = ("serious", "critical")
PATIENCE_MS = 60_000
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
COUNT_FRAMES = """(milliseconds) => new Promise((done) => {
  let frames = 0;
  const begin = performance.now();
  const count = (now) => {
    frames += 1;
    if (now - begin < milliseconds) requestAnimationFrame(count);
    else done((1000 * frames) / (now - begin));
  };
  requestAnimationFrame(count);
})"""


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    expect(page.get_by_role("tabpanel", name=name)).to_be_visible()


def chat(page: Page, folder: Path) -> None:
    """An answer with tools and colours, two models side by side, an answer of a schema, an export."""
    tab(page, "Chat")
    page.locator("summary").first.click()
    page.get_by_label("Demo tools").check()
    page.get_by_label("Colour by probability").check()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("What is 17 plus 25?")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#chat-send")).to_be_enabled(timeout=PATIENCE_MS)
    expect(page.locator(".message.tool").first).to_contain_text("42")
    assert page.locator("[class^=lp]").count() or "add(" in page.locator("pre").first.inner_text()
    expect(page.locator(".stats").first).to_contain_text("cached")
    page.screenshot(path=folder / "chat.png")
    page.get_by_label("Demo tools").uncheck()
    page.get_by_label("Structured answer").check()
    page.get_by_label("JSON schema").fill('{"type": "object", "properties": {"n": {}}, "required": ["n"]')
    expect(page.locator("#chat-schema-state")).to_contain_text("not JSON")
    page.get_by_label("JSON schema").fill(
        '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],'
        ' "additionalProperties": false}'
    )
    page.locator("#chat-clear").click()
    page.locator("#chat-add").click()
    page.get_by_label("Message", exact=True).fill("A number?")
    page.locator("#chat-send").click()
    expect(page.locator("#chat-send")).to_be_enabled(timeout=PATIENCE_MS)
    answers = page.locator(".message.assistant")
    assert answers.count() == 2
    for number in range(2):
        value = json.loads(answers.nth(number).locator("span").nth(1).inner_text())
        assert list(value) == ["n"] and isinstance(value["n"], int)
    with page.expect_download() as waited:
        page.locator("#chat-export").click()
    exported = json.loads(Path(waited.value.path()).read_text())
    assert [len(one["messages"]) for one in exported["conversations"]] == [2, 2]
    page.get_by_label("Structured answer").uncheck()


def engine(page: Page, folder: Path) -> float:
    """Rows, queue, blocks and plots that change; returns frames a second."""
    tab(page, "Engine")
    batch = page.get_by_role("region", name="Running")
    expect(batch.locator("tbody tr").first).to_be_visible(timeout=PATIENCE_MS)
    queue = page.get_by_role("region", name="Waiting")
    expect(queue.locator("tbody tr").first).to_contain_text("max_num_seqs reached", timeout=PATIENCE_MS)
    expect(page.locator(".plot path").first).to_be_attached(timeout=PATIENCE_MS)
    assert "blocks of" in (page.locator("canvas").first.get_attribute("aria-label") or "")
    page.get_by_text("Show the tree").click()
    expect(page.locator(".tree li").first).to_be_visible()
    before = batch.inner_text()
    expect(batch).not_to_have_text(before, timeout=PATIENCE_MS)
    frames = float(page.evaluate(COUNT_FRAMES, 4000))
    page.screenshot(path=folder / "engine.png", full_page=True)
    page.locator("#engine-pause").click()
    expect(page.locator("#engine-pause")).to_have_attribute("aria-pressed", "true")
    return frames


def requests(page: Page, folder: Path) -> None:
    """The timeline of a request that ended."""
    tab(page, "Requests")
    done = page.locator("tr", has=page.get_by_text("200", exact=True))
    done.first.get_by_role("button").click(timeout=PATIENCE_MS)
    expect(page.locator("svg.timeline rect").first).to_be_attached()
    expect(page.get_by_text("Why its prefix ended")).to_be_visible()
    expect(page.get_by_role("row", name="decode")).to_be_visible()
    page.screenshot(path=folder / "requests.png")


def plan(page: Page, folder: Path) -> None:
    """A simulation."""
    tab(page, "Plan")
    page.locator("#plan-hardware").select_option("Xeon")
    page.get_by_label("Output tokens", exact=True).fill("20")
    page.locator("#plan-run").click()
    expect(page.get_by_text("Simulated: the real scheduler")).to_be_visible(timeout=4 * PATIENCE_MS)
    expect(page.get_by_text("output tokens/s", exact=True)).to_be_visible()
    page.screenshot(path=folder / "plan.png")


def metrics_and_config(page: Page, folder: Path) -> None:
    """Filters of both."""
    tab(page, "Metrics")
    page.get_by_label("Filter").fill("time_to_first_token")
    row = page.get_by_role("region", name="Series of /metrics").locator("tbody tr").first
    expect(row).to_contain_text("p95", timeout=PATIENCE_MS)
    page.screenshot(path=folder / "metrics.png")
    tab(page, "Config")
    page.locator("#config-changed").check()
    expect(page.locator("#panel-config")).to_contain_text("max_num_seqs")
    page.screenshot(path=folder / "config.png")


def keyboard(page: Page) -> None:
    """Tabs by arrow keys; one stop in the order of focus."""
    page.get_by_role("tab", name="Config").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("tab", name="Config")).to_have_attribute("aria-selected", "true")
    assert page.locator("[role=tab][tabindex='0'], [role=tab]:not([tabindex])").count() == 1


def check_accessibility(page: Page, axe: str) -> list[dict[str, Any]]:
    """Serious findings of axe-core in every tab."""
    found = []
    for name in TABS:
        tab(page, name)
        page.wait_for_timeout(500)
        page.evaluate(axe)
        result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        found += [
            {"tab": name, "rule": one["id"], "impact": one["impact"], "where": one["nodes"][0]["html"][:200]}
            for one in result["violations"] if one["impact"] in SERIOUS
        ]  # fmt: skip
    return found


def main() -> None:
    url, chromium, axe_file, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    axe = Path(axe_file).read_text()
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda one: problems.append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda one: problems.append(str(one)))
        foreign: list[str] = []
        page.on("request", lambda one: foreign.append(one.url) if not one.url.startswith((url, "blob:")) else None)
        page.goto(url)
        chat(page, folder)
        frames = engine(page, folder)
        requests(page, folder)
        plan(page, folder)
        metrics_and_config(page, folder)
        keyboard(page)
        findings = {}
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            findings[theme] = check_accessibility(page, axe)
        tab(page, "Engine")
        page.wait_for_timeout(2500)
        page.screenshot(path=folder / "engine-dark.png")
        page.set_viewport_size({"width": 390, "height": 844})
        page.emulate_media(color_scheme="light")
        findings["phone"] = check_accessibility(page, axe)
        too_wide = [
            name for name in TABS
            if (tab(page, name), page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"))[1]
        ]  # fmt: skip
        tab(page, "Chat")
        page.screenshot(path=folder / "phone.png")
        browser.close()
    found = {"frames_per_second": round(frames, 1), "accessibility": findings, "wider_than_a_phone": too_wide}
    print(json.dumps(found))
    assert not foreign, f"the page asked for {foreign}"
    assert not problems, f"the console has {problems}"
    assert not any(findings.values()) and not too_wide


if __name__ == "__main__":
    main()
