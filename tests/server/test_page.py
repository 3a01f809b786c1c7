"""The page at `/`: what its files promise without a browser. `make test-page` has one."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest

from quire.server.debug.planning import PlanRequest
from quire.server.debug.state import DebugState, ModelLive, Series
from quire.server.http.recent_requests import RequestTimeline
from quire.server.page.files import STATIC, TYPES
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_debug import get, is_struct

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(path for path in STATIC.iterdir() if path.is_file())
SCRIPTS = {path.name: path.read_text() for path in FILES if path.suffix == ".js"}
MAX_BYTES = 250_000
VOID = {"meta", "link", "input", "br"}


class Elements(HTMLParser):
    """Every element of a document, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts[self.found[-1][1].get("id", "")] = data.strip()

    def all(self, **wanted: str) -> list[dict[str, str]]:
        return [attrs for _, attrs in self.found if all(attrs.get(name) == value for name, value in wanted.items())]


@pytest.fixture(scope="module")
def index() -> Elements:
    return Elements((STATIC / "index.html").read_text())


def test_browsers_get_the_page_and_probes_the_line_they_always_got(server):
    page = httpx.get(server.url + "/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for accept in ("*/*", "application/json", None):
        answer = httpx.get(server.url + "/", headers={} if accept is None else {"accept": accept})
        assert answer.text.startswith("Quire: OpenAI's API is under /v1")


def test_every_file_comes_with_headers_that_keep_the_page_to_itself(server):
    assert sum(path.stat().st_size for path in FILES) <= MAX_BYTES
    for path in FILES:
        answer = httpx.get(f"{server.url}/page/{path.name}")
        assert answer.content == path.read_bytes() and answer.headers["content-type"] == TYPES[path.suffix]
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy) and answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(f"{server.url}/page/{path.name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("nothing.js", "../files.py", "%2e%2e/files.py", "..%2ffiles.py"):
        assert httpx.get(f"{server.url}/page/{name}").status_code == 404


def test_nothing_is_loaded_from_elsewhere_and_no_script_or_style_is_inline(index):
    for path in FILES:
        text = re.sub(r"http://www\.w3\.org/\d+/svg", "", path.read_text())
        foreign = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
        assert not foreign, (path.name, foreign)
    for tag, attrs in index.found:
        assert "style" not in attrs and not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert tag != "style" and (tag != "script" or attrs.get("src"))
    for name, text in SCRIPTS.items():
        assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function", text), name


def test_all_files_that_are_named_exist(index):
    names = {path.name for path in FILES}
    linked = [attrs.get("src") or attrs.get("href", "") for tag, attrs in index.found if tag in ("script", "link")]
    assert linked and all(link.startswith("page/") and link[5:] in names for link in linked)
    for name, text in SCRIPTS.items():
        imported = re.findall(r'from "(.+?)"', text)
        assert all(one.startswith("./") and one[2:] in names for one in imported), (name, imported)
        for exports, source in re.findall(r'import \{ ([^}]+) \} from "\./(.+?)"', text):
            for one in exports.split(", "):
                exported = rf"export (?:async )?(?:function\*?|class|const) {one}\b"
                assert re.search(exported, SCRIPTS[source]), (name, one)


def test_tabs_panels_labels_and_landmarks_are_those_of_the_aria_pattern(index):
    tabs, panels = index.all(role="tab"), index.all(role="tabpanel")
    assert len(tabs) == len(panels) == 6 and len(index.all(role="tablist")) == 1
    for tab, panel in zip(tabs, panels):
        assert tab["aria-controls"] == panel["id"] and panel["aria-labelledby"] == tab["id"]
        assert (tab["aria-selected"] == "true") == ("hidden" not in panel) == ("tabindex" not in tab)
    tags = [tag for tag, _ in index.found]
    assert tags.count("main") == tags.count("header") == tags.count("h1") == 1
    assert index.found[0] == ("html", {"lang": "en"}) and "title" in tags
    labelled = {attrs["for"] for tag, attrs in index.found if tag == "label"}
    assert {attrs["id"] for tag, attrs in index.found if tag == "input"} <= labelled
    ids = [attrs["id"] for _, attrs in index.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    made = set(re.findall(r'id: "([\w-]+)"', "".join(SCRIPTS.values())))
    made |= set(re.findall(r'number\("([\w-]+)"', SCRIPTS["chat.js"]))
    for name, text in SCRIPTS.items():
        missing = [one for one in re.findall(r'find\("([\w-]+)"\)', text) if one not in {*ids, *made}]
        assert not missing, (name, missing)


def paths_of_the_page() -> set[str]:
    """What the scripts ask the server for."""
    calls = re.findall(r'(?:getJson|getText|postJson|events)\("([^"?]+)', "".join(SCRIPTS.values()))
    return {f"/{path}" for path in calls}


def test_everything_that_the_page_asks_for_exists(server):
    asked = paths_of_the_page()
    assert {"/v1/models", "/v1/chat/completions", "/debug/state", "/debug/plan", "/metrics", "/version"} <= asked
    described = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert asked <= set(described)


@pytest.mark.parametrize(
    ("script", "names", "known"),
    [
        ("engine.js", r"(?:state|model|engine)\.(\w+)", (DebugState, ModelLive)),
        ("requests.js", r"\bone\.(\w+)", (RequestTimeline,)),
    ],
)
def test_fields_that_the_page_reads_are_fields_of_the_answers(script, names, known):
    fields = {one for kind in known for one in structs_of(kind)}
    browser = {"abort", "cells", "dataset", "id", "status", "find", "js", "innerText"}
    read = set(re.findall(names, SCRIPTS[script].split("class EngineView")[-1]))
    assert len(read & fields) >= 8 and not read - fields - browser, read - fields - browser
    columns = re.search(r"const COLUMNS = \[(.*?)\]", SCRIPTS["engine.js"], re.S)
    kept = set(re.findall(r'"(\w+)"', columns[1])) if columns else set()
    shown = set(re.findall(r'last\("(\w+)"\)', SCRIPTS["engine.js"]))
    assert shown and shown <= kept <= set(Series.__struct_fields__), shown - kept


def structs_of(kind: Any) -> set[str]:
    """Names of the fields of a struct and of those in it."""
    names = set()
    for one in msgspec.structs.fields(kind):
        names.add(one.name)
        for inner in (one.type, *get_args(one.type)):
            names |= structs_of(inner) if is_struct(inner) else set()
    return names


def test_sliders_of_the_plan_are_fields_of_its_request():
    text = SCRIPTS["plan.js"]
    sliders = re.findall(r'^\s+\["(\w+)", "', text, re.M) + re.findall(r'\], \["(\w+)", "', text)
    assert len(sliders) == 9 and set(sliders) <= set(PlanRequest.__struct_fields__)


def test_with_keys_the_page_is_open_and_what_it_reads_is_not():
    with RunningServer(ScriptedEngine(), api_key="secret-key-1", root_path="/api") as guarded:
        for path in ("/", "/page/app.js", "/api/page/app.js"):
            assert httpx.get(guarded.url + path, headers=BROWSER).status_code == 200
        for path in ("/version", "/debug/state", "/page/x/../../version"):
            assert httpx.get(guarded.url + path).status_code in (401, 404)
        key = {"authorization": "Bearer secret-key-1"}
        assert get(guarded, "/debug/state", headers=key)["models"]


def test_one_flag_turns_the_page_off():
    with RunningServer(ScriptedEngine(), disable_page=True) as plain:
        assert httpx.get(plain.url + "/", headers=BROWSER).text.startswith("Quire: OpenAI's API")
        assert httpx.get(plain.url + "/page/app.js").status_code == 404


def test_the_package_holds_no_other_files():
    assert {path.suffix for path in FILES} <= set(TYPES) and not [p for p in STATIC.rglob("*") if p.parent != STATIC]
    assert (Path(STATIC) / "index.html").exists()
