"""Child processes are started in one place, which decides where they look for modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.test_readability import PACKAGE, ROOT, relative

HOME = ROOT / "quire" / "utils" / "children.py"
MODULES = {"multiprocessing", "runpy", "pty"}
CALLS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "sys": {"executable", "_base_executable"},
}  # fmt: skip
FAMILIES = {"os": ("exec", "spawn")}
WORDS = re.compile(r"process|runpy|pty|executable|exec|spawn|system|popen")
NAMES = {"ProcessPoolExecutor"}


def starts(path: Path) -> list[str]:
    found, text = [], path.read_text()
    for node in ast.walk(ast.parse(text)) if WORDS.search(text) else ():
        named: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            named = [(alias.name.partition(".")[0], "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [((node.module or "").partition(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = [(node.value.id, node.attr)]
        found += [f"{relative(path)}:{node.lineno}: {a}.{b}" for a, b in named if is_start(a, b)]  # type: ignore[attr-defined]
    return found


def is_start(module: str, name: str) -> bool:
    if module in MODULES or name in NAMES or name in CALLS.get(module, ()):
        return True
    return name.startswith(FAMILIES.get(module, ("\0",)))


def test_only_one_module_starts_processes():
    assert starts(HOME), "the test finds what it looks for"
    found = [start for path in PACKAGE if path != HOME for start in starts(path)]
    assert not found, f"start children by quire.utils.children: {found}"
