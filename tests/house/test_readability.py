"""Sizes and words that keep the core readable."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for top in ("quire", "training", "benchmarks", "tests") for p in (ROOT / top).rglob("*.py"))
PACKAGE = [p for p in SOURCES if p.is_relative_to(ROOT / "quire")]
TEXTS = [p for p in ROOT.rglob("*.md") if not {"build", ".venv", "node_modules"} & set(p.relative_to(ROOT).parts)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_over_500_lines():
    long = {relative(p): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"each of these is probably two things; split it: {long}"


def test_no_function_of_the_package_is_over_90_lines():
    long = {}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 90:
                    long[f"{relative(path)}:{node.name}"] = length
    assert not long, f"split these: {long}"


@pytest.mark.parametrize(
    ("path", "name", "most"),
    [("quire/scheduler/scheduler.py", "Scheduler", 15), ("quire/worker/model_runner.py", "ModelRunner", 18)],
)
def test_the_classes_where_every_feature_wants_to_be_have_few_attributes(path: str, name: str, most: int):
    tree = ast.parse((ROOT / path).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    attributes = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert 0 < len(attributes) <= most, f"give what it owns to an object of its own: {sorted(attributes)}"


def test_every_module_of_the_package_says_what_it_is():
    silent = [relative(p) for p in PACKAGE if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent, f"add a module docstring to {silent}"


def test_only_the_operations_of_a_device_ask_what_the_device_is():
    of_devices = ("quire/kernels/", "quire/sample/ops/", "quire/attention/backends/", "quire/models/packed_file.py")
    asking = [
        f"{relative(path)}:{i}"
        for path in PACKAGE
        if not relative(path).startswith(of_devices)
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"device\.type\s*(==|!=|in\b)|\.is_cuda\b(?!\()", line)
    ]
    assert not asking, f"make it a part of DeviceOps (docs/adr/0047-device-operations.md): {asking}"


@pytest.mark.parametrize(
    "package", ["scheduler", "kv_cache", "engine", "structured_output", "worker", "server/http", "server/chat"]
)
def test_the_map_of_a_large_package_names_every_module(package: str):
    folder = ROOT / "quire" / package
    named = set(re.findall(r"\w+", ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""))
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    missing = sorted((modules | folders) - named)
    assert not missing, f"name these in the docstring of quire/{package}/__init__.py: {missing}"


def test_nothing_is_swallowed():
    swallowing = []
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "BaseException")
                only_pass = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                broad = isinstance(node.type, ast.Name) and node.type.id == "Exception"
                if (bare and not any(isinstance(n, ast.Raise) for n in ast.walk(node))) or (broad and only_pass):
                    swallowing.append(f"{relative(path)}:{node.lineno}")
    assert not swallowing, f"name the exception and log or answer it: {swallowing}"


def test_the_package_runs_no_code_from_data():
    words = re.compile(r"\b(pickle|marshal|shelve)\b.*import|import (pickle|marshal|shelve)|(?<![.\w])(eval|exec)\(")
    found = [
        f"{relative(p)}:{i}"
        for p in PACKAGE
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found, f"no pickle, no eval: {found}"


FILE_NAMES = re.compile(r"`((?:quire|csrc|training|benchmarks|tests|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", *sorted(p.name for p in (ROOT / "docs/explanation").glob("*.md"))])
def test_files_named_in_the_pages_about_the_code_exist(page: str):
    text = (ROOT / (page if page == "ARCHITECTURE.md" else f"docs/explanation/{page}")).read_text()
    named = set(FILE_NAMES.findall(text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert named and not missing, f"{page} names files that are gone: {missing}"


def test_the_architecture_page_is_one_page_with_every_package():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    num_lines, num_names = len(text.splitlines()), len(set(FILE_NAMES.findall(text)))
    assert num_lines <= 140 and num_names <= 40, (
        f"{num_lines} lines, {num_names} files: move a topic to docs/explanation"
    )
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|", text))))
    packages = {path.parent.name for path in (ROOT / "quire").glob("*/__init__.py")}
    assert packages == listed & packages, f"give these a line under Packages: {sorted(packages - listed)}"


@pytest.mark.parametrize("page", TEXTS, ids=relative)
def test_relative_links_lead_somewhere(page: Path):
    broken = [
        target
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, f"{relative(page)} links to {broken}"


def test_the_version_has_an_entry_in_the_changelog():
    version = re.search(r'__version__ = "(.+)"', (ROOT / "quire/version.py").read_text())
    assert version and f"[{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_generated_is_committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not [
        name
        for name in tracked
        if name.endswith((".pyc", ".so", ".whl", ".tar.gz", ".zip", ".pt")) or name.startswith(("build/", ".venv/"))
    ]
