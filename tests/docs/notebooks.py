"""Notebooks, executed: by nbclient in a kernel of its own (`make test-docs`), or cell by cell in this process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT

FOLDER = ROOT / "docs/notebooks"


def notebooks() -> list[Path]:
    """All of them."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[str]:
    """The code of a notebook, by cell."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def problem(path: Path) -> str:
    """What is wrong with a notebook as it is stored; "" = nothing."""
    cells = json.loads(path.read_text())["cells"]
    if any(cell.get("outputs") or cell.get("execution_count") for cell in cells):
        return "clear all outputs: what it prints is checked when it is executed"
    if sum("assert " in code for code in code_cells(path)) < 2:
        return "assert what the text says"
    return ""


def run_here(path: Path) -> None:
    """Execute the cells in this process."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, code in enumerate(code_cells(path), 1):
        exec(compile(code, f"{path.name} cell {number}", "exec"), names)


def run_in_kernel(path: Path) -> str:
    """Execute the notebook as Jupyter does; returns what went wrong, "" = nothing."""
    if importlib.util.find_spec("nbclient") is None:
        run_here(path)
        return ""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    try:
        NotebookClient(nbformat.read(path, as_version=4), timeout=600, kernel_name="python3").execute(cwd=str(ROOT))
    except CellExecutionError as error:
        return str(error)[-3000:]
    return ""
